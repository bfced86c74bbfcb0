"""Answers of OpenAI's responses: one object, or the events that build it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lmi_core.engine.outputs import FinishReason, TokenEvent
from lmi_core.tools.calls import CallStart, Content, Piece, Reasoning
from lmi_server.dialects.base import UTF8_EVENTS, Renderer
from lmi_server.dialects.openai.chat_output import pieces_of
from lmi_server.dialects.openai.chat_tools import AnswerForm
from lmi_server.dialects.openai.errors import error_body
from lmi_server.dialects.openai.responses_items import Call, CustomCall, Event, Item, Text

Keep = Callable[[str, str], bool]
"""Stores a response that has ended by its id and its JSON, if there is room."""


class Response:
    """What was said so far: items, counts, and how it ended."""

    def __init__(
        self,
        head: Mapping[str, Any],
        form: AnswerForm | None,
        customs: frozenset[str] = frozenset(),
        sole: str | None = None,
        *,
        stores: bool,
    ) -> None:
        """``head``: its id, and what else the object says of its request, of any size: written
        here, where large requests are decoded. ``customs``: the names of custom tools; ``sole``:
        the one whose input the whole text is."""
        self._id = str(head["id"])
        self._head = json.dumps(head, ensure_ascii=False)[:-1]
        self._is_stored = stores
        self._parser = None if form is None else form.parser()
        self._customs = customs
        self._sole = sole
        self._items: list[Item] = []
        self._is_open = False
        """The last item goes on."""
        self._reason: FinishReason | None = None
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_generated_tokens = 0
        self._num_reasoning_tokens = 0
        self._num_undecided_tokens = 0
        """Those since the last piece, which belong to the next one."""
        self.messages: bytes | None = None
        """What a response that is to be stored goes on from, as JSON."""
        self.keep: Keep | None = None

    def add(self, event: TokenEvent) -> list[Event]:
        """The events that a token makes."""
        if self._parser is None:
            pieces: list[Piece] = [Content(event.text)] if event.text else []
        else:
            pieces = pieces_of(self._parser, event)
        self._count(event, pieces)
        events: list[Event] = []
        for piece in pieces:
            events += self._piece(piece)
        return events

    def finish(self) -> list[Event]:
        """The events of the end but the last; an answer without a word is an empty message."""
        events = [] if self._items else self._piece(Content(""))
        events += self._close()
        if self.keep is not None:
            self._is_stored = self.keep(self._id, self.text())
        return events

    @property
    def status(self) -> str:
        is_cut = self._reason is FinishReason.LENGTH
        return "in_progress" if self._reason is None else "incomplete" if is_cut else "completed"

    def text(self, error: Mapping[str, Any] | None = None) -> str:
        """The response as it is now, as JSON; ``error``: what it failed with."""
        status = self.status if error is None else "failed"
        is_cut = self._reason is FinishReason.LENGTH
        now = {
            "error": error,
            "store": self._is_stored,
            "status": status,
            "completed_at": int(time.time()) if self.status == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [item.object() for item in self._items],
            "usage": None if self._reason is None else self._usage(),
        }
        return f"{self._head}, {json.dumps(now, ensure_ascii=False)[1:]}"

    def _usage(self) -> dict[str, Any]:
        prompt, generated = self._num_prompt_tokens, self._num_generated_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {
                "cached_tokens": self._num_cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": generated,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
            "total_tokens": prompt + generated,
        }

    def _count(self, event: TokenEvent, pieces: Sequence[Piece]) -> None:
        self._num_prompt_tokens = event.num_prompt_tokens
        self._num_cached_tokens = event.num_cached_tokens
        self._num_generated_tokens += event.token_id >= 0
        self._num_undecided_tokens += event.token_id >= 0
        if any(isinstance(piece, Reasoning) for piece in pieces):
            self._num_reasoning_tokens += self._num_undecided_tokens
        if pieces:
            self._num_undecided_tokens = 0
        self._reason = event.finish_reason

    def _piece(self, piece: Piece) -> list[Event]:
        events: list[Event] = []
        if not self._is_open or not self._items[-1].takes(piece):
            events = self._close()
            item = self._item(piece)
            self._items.append(item)
            self._is_open = True
            events += self._placed(item.begin())
        return events + self._placed(self._items[-1].add(piece))

    def _item(self, piece: Piece) -> Item:
        if isinstance(piece, CallStart):
            return (CustomCall if piece.name in self._customs else Call)(piece.name)
        if self._sole is not None and isinstance(piece, Content):
            return CustomCall(self._sole, is_text=True)
        return Text(is_reasoning=isinstance(piece, Reasoning))

    def _close(self) -> list[Event]:
        if not self._is_open:
            return []
        self._is_open = False
        return self._placed(self._items[-1].end(is_cut=self._reason is FinishReason.LENGTH))

    def _placed(self, events: Sequence[Event]) -> list[Event]:
        """With the place of the last item, and its id where the item itself isn't there."""
        place = {"output_index": len(self._items) - 1}
        named = {"item_id": self._items[-1].id, **place} if self._items else place
        return [(kind, {**(place if "item" in has else named), **has}) for kind, has in events]


class ResponseRenderer(Renderer):
    """One ``response`` object at the end."""

    streams = False
    content_type = "application/json"

    def __init__(self, response: Response) -> None:
        self.response = response

    def feed(self, index: int, events: Sequence[TokenEvent]) -> bytes:
        for event in events:
            self.response.add(event)
        return b""

    def finish(self) -> bytes:
        self.response.finish()
        return self.response.text().encode("utf-8", "replace")

    def error(self, error: Exception) -> bytes:
        return error_body(error)


class ResponseEventsRenderer(ResponseRenderer):
    """The response's events, numbered; the last one has the whole of it."""

    streams = True
    content_type = UTF8_EVENTS

    def __init__(self, response: Response) -> None:
        super().__init__(response)
        self._num_events = 0

    def feed(self, index: int, events: Sequence[TokenEvent]) -> bytes:
        frames = []
        for event in events:
            if not self._num_events:
                frames += [self._whole(word) for word in ("created", "in_progress")]
            frames += [self._frame(*made) for made in self.response.add(event)]
        return b"".join(frames)

    def finish(self) -> bytes:
        frames = [self._frame(*made) for made in self.response.finish()]
        return b"".join([*frames, self._whole(self.response.status)])

    def error(self, error: Exception) -> bytes:
        detail = json.loads(error_body(error))["error"]
        told = {"code": detail["code"] or "server_error", "message": detail["message"]}
        return self._whole("failed", told)

    def _whole(self, word: str, error: Mapping[str, Any] | None = None) -> bytes:
        return self._event(f"response.{word}", f'"response": {self.response.text(error)}}}')

    def _frame(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        return self._event(kind, json.dumps(fields, ensure_ascii=False)[1:])

    def _event(self, kind: str, fields: str) -> bytes:
        """``fields``: the JSON of an object behind its first brace."""
        before = f'event: {kind}\ndata: {{"type": "{kind}", "sequence_number": {self._num_events}, '
        self._num_events += 1
        return f"{before}{fields}\n\n".encode("utf-8", "replace")
