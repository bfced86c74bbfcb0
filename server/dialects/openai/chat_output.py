"""Chat completion responses: one object, or chunks as lines or server-sent events.

Objects are OpenAI's; as LMI does it, chunks of its routes come as JSON lines unless the client
accepts ``text/event-stream``. (djl_python/chat_completions.)
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import partial
from json.encoder import encode_basestring as quote
from typing import Any

from lmi_core.engine.outputs import FinishReason, PromptToken, TokenEvent
from lmi_core.tools.calls import CallArguments, CallStart, Content, Piece, Reasoning
from lmi_core.tools.reader import TextParser
from lmi_server.dialects.base import Renderer
from lmi_server.dialects.encode import Shown, encoded
from lmi_server.dialects.openai.chat_tools import AnswerForm
from lmi_server.dialects.openai.output import (
    TEXT,
    Answer,
    Usage,
    finish_word,
    finite,
    token_text,
)

_Entry = tuple[int, str, float | None]
"""A token's id, its text and its log-probability."""
_Scored = tuple[_Entry, tuple[_Entry, ...]]
"""A generated token, and the likeliest in its place."""


class _Choice:
    """One choice's message as it grows."""

    def __init__(self, form: AnswerForm | None, before: str = "") -> None:
        """``before``: what the content begins with that the model didn't write."""
        self.token_ids: list[int] = []
        self.logprobs: list[_Scored] = []
        self.finish_reason: str | None = None
        self._texts = [before] if before else []
        self._calls: list[tuple[str, list[str]]] = []
        self._reasoning: list[str] = []
        self._has_reasoning = form is not None and form.has_reasoning
        self._parser = None if form is None else form.parser()

    def add(self, event: TokenEvent) -> None:
        if self._parser is None:
            self._texts.append(event.text)
        else:
            self._add_pieces(pieces_of(self._parser, event))
        if event.finish_reason is not None:
            self.finish_reason = chat_finish_word(event.finish_reason, bool(self._calls))

    def message(self) -> dict[str, Any]:
        content = "".join(self._texts)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self._has_reasoning:
            message["content"] = content or None
            message |= _reasoning("".join(self._reasoning) or None)
        if self._calls:
            message["content"] = content or None
            message["tool_calls"] = [
                tool_call(name, "".join(arguments)) for name, arguments in self._calls
            ]
        return message

    def _add_pieces(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            match piece:
                case Content(text):
                    self._texts.append(text)
                case Reasoning(text):
                    self._reasoning.append(text)
                case CallStart(_, name):
                    self._calls.append((name, []))
                case CallArguments(index, text):
                    self._calls[index][1].append(text)


class ChatRenderer(Renderer):
    """One ``chat.completion`` object at the end."""

    streams = False
    content_type = "application/json"

    def __init__(self, answer: Answer, form: AnswerForm | None = None, *, before: str = "") -> None:
        """``before``: what every choice's content begins with that the model didn't write."""
        self._answer = answer
        self._choices = [_Choice(form, before) for _ in range(answer.num_choices)]
        self._usage = Usage()
        self._prompt: Sequence[PromptToken] | None = None

    def feed(self, index: int, events: Sequence[TokenEvent]) -> bytes:
        for event in events:
            if event.prompt is not None:
                self._prompt = event.prompt
                continue
            choice = self._choices[event.choice]
            self._usage.add(event)
            choice.add(event)
            if event.token_id >= 0:
                choice.token_ids.append(event.token_id)
            if self._answer.logprobs:
                choice.logprobs.append(_scored(event))
        return b""

    def finish(self) -> bytes:
        choices = [self._object(*numbered) for numbered in enumerate(self._choices)]
        head = self._answer.head("chat.completion")
        prompt = self._answer.prompt_fields(self._prompt)
        value = {**head, "choices": choices, "usage": self._usage.render(), **prompt}
        return encoded(value, compact=self._answer.compact)

    def _object(self, index: int, choice: _Choice) -> dict[str, Any]:
        content = Shown(choice.logprobs, partial(_logprob, answer=self._answer))
        shown = {
            "index": index,
            "message": choice.message(),
            "logprobs": {"content": content} if self._answer.logprobs else None,
            "finish_reason": choice.finish_reason,
        }
        if self._answer.token_ids:
            shown["token_ids"] = choice.token_ids
        return shown

    def error(self, error: Exception) -> bytes:
        return self._answer.error(error)


class ChatStreamRenderer(Renderer):
    """``chat.completion.chunk`` objects as server-sent events or lines.

    Most chunks differ in their text alone, so they are made of a template around it. Where tools
    may be called, an event can make several chunks: text, beginnings of calls, their arguments.
    """

    streams = True

    def __init__(self, answer: Answer, form: AnswerForm | None = None, *, before: str = "") -> None:
        """``before``: what every choice's content begins with that the model didn't write."""
        self.content_type = answer.stream_type
        self._answer = answer
        self._before = before
        self._hides_reasoning = form is not None and not form.shows_reasoning
        self._prompt: Sequence[PromptToken] | None = None
        self._is_plain = not (answer.logprobs or answer.token_ids or answer.usage_in_chunks)
        self._has_begun = [False] * answer.num_choices
        self._usage = Usage()
        self._parsers = [form.parser() for _ in range(answer.num_choices)] if form else []
        self._templates = [
            answer.around_text(self._object(index, {"content": TEXT}))
            for index in range(answer.num_choices)
        ]

    def feed(self, index: int, events: Sequence[TokenEvent]) -> bytes:
        frames = []
        for event in events:
            if event.prompt is not None:
                self._prompt = event.prompt
                continue
            self._usage.add(event)
            if self._parsers:
                frames += self._tool_chunks(event)
            else:
                frames.append(self._chunk(event))
        return "".join(frames).encode()

    def finish(self) -> bytes:
        end = self._answer.stream_end
        if self._answer.usage:
            head = self._answer.head("chat.completion.chunk")
            counts = {**head, "choices": [], "usage": self._usage.render()}
            end = self._answer.frame(counts) + end
        return end.encode()

    def error(self, error: Exception) -> bytes:
        last = self._answer.error(error)
        return self._answer.framed(last.decode()).encode() if self._answer.as_events else last

    def _chunk(self, event: TokenEvent) -> str:
        if not self._has_begun[event.choice]:
            self._has_begun[event.choice] = True
            text = self._before + event.text
            delta: dict[str, Any] = {"role": "assistant", "content": text}
        elif event.finish_reason is None and self._is_plain:
            if not event.text:  # half a character, or the beginning of a stop string
                return ""
            before, after = self._templates[event.choice]
            return before + quote(event.text) + after
        else:
            delta = {"content": event.text}
        reason = event.finish_reason
        finish = None if reason is None else finish_word(reason)
        is_long = self._prompt is not None
        return self._answer.frame(self._object(event.choice, delta, event, finish), is_long=is_long)

    def _tool_chunks(self, event: TokenEvent) -> list[str]:
        """The deltas of an event; its log-probability is in the first, the end in the last."""
        parser = self._parsers[event.choice]
        pieces = pieces_of(parser, event)
        if self._hides_reasoning:
            pieces = [piece for piece in pieces if not isinstance(piece, Reasoning)]
        deltas = [_delta(piece) for piece in pieces]
        finish = None
        if event.finish_reason is not None:
            finish = chat_finish_word(event.finish_reason, parser.num_calls > 0)
        if finish is not None or not (self._is_plain or deltas):
            deltas.append({})
        if deltas and not self._has_begun[event.choice]:
            self._has_begun[event.choice] = True
            content = self._before + (deltas[0].get("content") or "")
            deltas[0] = {"role": "assistant", **deltas[0], "content": content or None}
        last = len(deltas) - 1
        return [
            self._answer.frame(
                self._object(
                    event.choice,
                    delta,
                    event if number == 0 else None,
                    finish if number == last else None,
                )
            )
            for number, delta in enumerate(deltas)
        ]

    def _object(
        self,
        choice: int,
        delta: dict[str, Any],
        event: TokenEvent | None = None,
        finish: str | None = None,
    ) -> dict[str, Any]:
        """``event``: whose log-probability to report, if asked for."""
        answer = self._answer
        told = None if event is None or event.token_id < 0 else event
        logprobs = None
        if answer.logprobs and told:
            logprobs = {"content": [_logprob(_scored(told), answer)]}
        shown: dict[str, Any] = {
            "index": choice,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish,
        }
        chunk: dict[str, Any] = answer.head("chat.completion.chunk")
        chunk["choices"] = [shown]
        if answer.token_ids:
            shown["token_ids"] = [told.token_id] if told else []
            if self._prompt is not None:
                chunk |= answer.prompt_fields(self._prompt)
                self._prompt = None
        if answer.usage_in_chunks:
            chunk["usage"] = self._usage.render()
        elif answer.usage:
            chunk["usage"] = None
        return chunk


def _scored(event: TokenEvent) -> _Scored:
    top = tuple([(token.token_id, token.text, token.logprob) for token in event.top])
    return (event.token_id, token_text(event), event.logprob), top


def _logprob(scored: _Scored, answer: Answer) -> dict[str, Any]:
    token, top = scored
    return {**_entry(token, answer), "top_logprobs": [_entry(token, answer) for token in top]}


def _entry(entry: _Entry, answer: Answer) -> dict[str, Any]:
    token_id, text, logprob = entry
    return {
        "token": answer.name_of(token_id, text),
        "logprob": finite(logprob),
        "bytes": list(text.encode()),
    }


def pieces_of(parser: TextParser, event: TokenEvent) -> list[Piece]:
    """What an event adds to content and calls."""
    pieces = parser.push(event.text)
    if event.finish_reason is not None:
        pieces += parser.flush()
    return pieces


def chat_finish_word(reason: FinishReason, has_calls: bool) -> str:
    word = finish_word(reason)
    return "tool_calls" if has_calls and word == "stop" else word


def tool_call(name: str, arguments: str) -> dict[str, Any]:
    """A call with an id of its own, by which its result will be sent back."""
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _reasoning(text: str | None) -> dict[str, Any]:
    """By both names that clients look for."""
    return {"reasoning": text, "reasoning_content": text}


def _delta(piece: Piece) -> dict[str, Any]:
    match piece:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return _reasoning(text)
        case CallStart(index, name):
            return {"tool_calls": [{"index": index, **tool_call(name, "")}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
