"""Responses in LMI's formats: ``json`` once at the end, ``jsonlines`` and ``sse`` per token.

The bytes are those of LMI 0.28/0.29: Python's default JSON spacing, non-ASCII unescaped, token
objects with int ids; those of older releases where the configuration asks for them. (LMI format
reference, 4.4 to 4.6, 4.8, 4.9.)
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring as quote
from typing import Any, TypeVar

from lmi_core.engine.outputs import PromptToken, TokenEvent, TokenLogprob
from lmi_core.errors import EngineError
from lmi_server.dialects.base import Renderer
from lmi_server.dialects.encode import Shown, encoded
from lmi_server.dialects.lmi.release import Release

T = TypeVar("T")

_FAILED_TOKEN = {"id": -1, "text": "", "log_prob": -1, "special_token": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a call wants to be told."""

    prompts: tuple[str, ...]
    as_list: bool = False
    """Answer a list with one object per prompt."""
    num_choices: int = 1
    num_candidates: int = 1
    """Generated per prompt; the choices are the likeliest of them."""
    is_ranked: bool = False
    """Candidates come in the order of their rank."""
    details: bool = False
    full_text: bool = False
    """Put the prompt in front of the generated text."""
    prompt_tokens: bool = False
    """Report the prompt's tokens (``prefill``)."""
    top_tokens: bool = False
    indented: bool = False
    """JSON on several lines, as pipelines answer."""
    tgi_names: bool = False
    """``logprob`` and ``special`` in token objects instead of LMI's own names."""
    release: Release = Release.V0_29


@dataclass(slots=True)
class _Choice:
    texts: list[str] = field(default_factory=list)
    tokens: list[tuple[PromptToken, bool]] = field(default_factory=list)
    """With whether they are special."""
    has_failed: bool = False
    top_tokens: list[tuple[TokenLogprob, ...]] = field(default_factory=list)
    logprob: float = 0.0
    num_tokens: int = 0
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)


class _Record:
    """Collects the events of one prompt."""

    def __init__(self, answer: Answer, prompt: str) -> None:
        self.prompt = prompt
        self.answer = answer
        self.choices = [_Choice() for _ in range(answer.num_candidates)]
        self.prompt_tokens: Sequence[PromptToken] = ()

    def add(self, event: TokenEvent, *, keep_token: bool) -> _Choice:
        choice = self.choices[event.choice]
        choice.texts.append(event.text)
        choice.num_tokens = event.num_generated_tokens
        choice.logprob += event.logprob or 0.0
        if event.finish_reason is not None:
            choice.finish_reason = str(event.finish_reason)
        if keep_token:
            token = PromptToken(event.token_id, event.text, event.logprob)
            choice.tokens.append((token, event.special))
        if self.answer.top_tokens:
            choice.top_tokens.append(event.top)
        return choice

    def best(self) -> list[_Choice]:
        """Those to return, the likeliest first."""
        ranked = self.choices
        if not self.answer.is_ranked:
            ranked = sorted(ranked, key=lambda choice: -choice.logprob)
        return ranked[: self.answer.num_choices]

    def prefill(self) -> Any:
        return self._listed(list(self.prompt_tokens), lambda t: _token(t, False, self.answer))

    def tokens(self, choice: _Choice) -> Any:
        if choice.has_failed:
            return [*(_token(*each, self.answer) for each in choice.tokens), {**_FAILED_TOKEN}]
        return self._listed(choice.tokens, lambda each: _token(*each, self.answer))

    def top_tokens(self, choice: _Choice) -> Any:
        return self._listed(
            choice.top_tokens, lambda top: [_token(token, False, self.answer) for token in top]
        )

    def _listed(self, items: list[T], show: Callable[[T], Any]) -> list[Any] | Shown[T]:
        """For JSON, which is written once."""
        return [show(item) for item in items] if self.answer.indented else Shown(items, show)

    def full_text(self, choice: _Choice) -> str:
        return self.prompt + choice.text if self.answer.full_text else choice.text

    def details(self, choice: _Choice, *, tokens: bool) -> dict[str, Any]:
        details: dict[str, Any] = {"finish_reason": choice.finish_reason}
        if self.answer.release >= Release.V0_27:
            details |= {"generated_tokens": choice.num_tokens, "inputs": self.prompt}
        if tokens:
            details["tokens"] = self.tokens(choice)
        if self.answer.prompt_tokens:
            details["prefill"] = self.prefill()
        if self.answer.top_tokens:
            details["top_tokens"] = self.top_tokens(choice)
        return details

    def fail(self, choice: _Choice) -> None:
        """End a choice with the token that stands for a failed step in release 0.28."""
        choice.has_failed = True
        choice.finish_reason = "error"


class JsonRenderer(Renderer):
    """One JSON object (or a list of them) when everything has been generated."""

    streams = False
    content_type = "application/json"

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._records = [_Record(answer, prompt) for prompt in answer.prompts]
        self.absorbs_failures = answer.release.ends_failures_in_form

    def feed(self, index: int, events: Sequence[TokenEvent]) -> bytes:
        record = self._records[index]
        for event in events:
            if event.prompt is not None:
                record.prompt_tokens = event.prompt
            else:
                record.add(event, keep_token=self._answer.details)
        return b""

    def finish(self) -> bytes:
        objects = [_json_object(record) for record in self._records]
        answer = objects if self._answer.as_list else objects[0]
        return _dumps_indented(answer) if self._answer.indented else encoded(answer)

    def error(self, error: Exception) -> bytes:
        if not self.absorbs_failures:
            return error_body(error, self._answer.release)
        for record in self._records:
            for choice in record.choices:
                if choice.finish_reason is None:
                    record.fail(choice)
        return self.finish()


def _json_object(record: _Record) -> dict[str, Any]:
    best, *others = record.best()
    if not others:
        result: dict[str, Any] = {"generated_text": record.full_text(best)}
        if record.answer.details:
            result["details"] = record.details(best, tokens=True)
        elif best.finish_reason == "error":
            result["details"] = {"finish_reason": "error"}
        return result
    details = {"inputs": record.prompt, **_sequence(record, best)}
    if record.answer.prompt_tokens:
        details["prefill"] = record.prefill()
    if record.answer.top_tokens:
        details["top_tokens"] = record.top_tokens(best)
    details["best_of_sequences"] = [
        {**_sequence(record, choice), "generated_text": record.full_text(choice)}
        for choice in others
    ]
    return {"generated_text": record.full_text(best), "details": details}


def _sequence(record: _Record, choice: _Choice) -> dict[str, Any]:
    return {
        "finish_reason": choice.finish_reason,
        "generated_tokens": choice.num_tokens,
        "tokens": record.tokens(choice),
    }


class JsonLinesRenderer(Renderer):
    """One JSON object per token and line; the last also carries the text and the details."""

    streams = True
    content_type = "application/jsonlines"

    def __init__(self, answer: Answer) -> None:
        self._record = _Record(answer, answer.prompts[0])
        self.absorbs_failures = answer.release.ends_failures_in_form
        self.ends_at_length = answer.details and answer.top_tokens
        self._logprob_key = ', "logprob": ' if answer.tgi_names else ', "log_prob": '
        self._special = ', "special": true' if answer.tgi_names else ', "special_token": true'
        self._not_special = ', "special": false' if answer.tgi_names else ""

    def feed(self, index: int, events: Sequence[TokenEvent]) -> bytes:
        return "".join([self._frame(line) for line in self._lines(events)]).encode()

    def finish(self) -> bytes:
        return b""

    def error(self, error: Exception) -> bytes:
        if self.absorbs_failures:
            return self._frame(self._failed_line()).encode()
        return error_body(error, self._record.answer.release)

    def _failed_line(self) -> str:
        choice = self._record.choices[0]
        self._record.fail(choice)
        line = {
            "token": _FAILED_TOKEN,
            "generated_text": self._record.full_text(choice),
            "details": {"finish_reason": "error"},
        }
        if self._record.answer.details:
            line["details"] = self._record.details(choice, tokens=False)
        return encoded(line).decode()

    def _frame(self, line: str) -> str:
        return line + "\n"

    def _lines(self, events: Sequence[TokenEvent]) -> list[str]:
        lines = []
        for event in events:
            if event.prompt is not None:
                self._record.prompt_tokens = event.prompt
                continue
            choice = self._record.add(event, keep_token=False)
            tail = "}" if event.finish_reason is None else self._last(choice)
            special = self._special if event.special else self._not_special
            lines.append(
                f'{{"token": {{"id": {event.token_id}, "text": {quote(event.text)}'
                f"{self._logprob_key}{_number(event.logprob)}{special}}}{tail}"
            )
        return lines

    def _last(self, choice: _Choice) -> str:
        tail = f', "generated_text": {quote(self._record.full_text(choice))}'
        if self._record.answer.details:
            details = encoded(self._record.details(choice, tokens=False))
            tail += f', "details": {details.decode()}'
        return tail + "}"


class SseRenderer(JsonLinesRenderer):
    """The lines of ``jsonlines`` as server-sent events."""

    content_type = "text/event-stream"

    def error(self, error: Exception) -> bytes:
        if self.absorbs_failures:
            return super().error(error)
        return self._frame(error_body(error, self._record.answer.release).decode()).encode()

    def _frame(self, line: str) -> str:
        return f"data: {line}\n\n"


class OlderLinesRenderer(JsonLinesRenderer):
    """Lines as releases up to 0.27 write them."""

    def _lines(self, events: Sequence[TokenEvent]) -> list[str]:
        return [self._line(event) for event in events if event.prompt is None]

    def _line(self, event: TokenEvent) -> str:
        choice = self._record.add(event, keep_token=False)
        answer = self._record.answer
        if answer.release <= Release.V0_25:
            return json.dumps({"outputs": [event.text]}, ensure_ascii=False)
        line: dict[str, Any] = {"token": _token(event, event.special, answer)}
        if event.finish_reason is not None:
            line["generated_text"] = self._record.full_text(choice)
            if answer.details:
                line["details"] = self._record.details(choice, tokens=False)
        return encoded(line).decode()


def error_code(error: Exception, release: Release = Release.V0_29) -> int:
    """The code in the error object, and the status where the release sets one."""
    return 500 if release == Release.V0_24 and isinstance(error, EngineError) else 424


def error_body(error: Exception, release: Release = Release.V0_29) -> bytes:
    """The error object of LMI's model handlers."""
    body = {"code": error_code(error, release), "error": str(error)}
    if release == Release.V0_24:
        text = json.dumps(body, ensure_ascii=False)
    elif release <= Release.V0_26:
        text = json.dumps(body, ensure_ascii=False, indent=2)
    else:
        text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


def _token(
    token: TokenEvent | PromptToken | TokenLogprob, special: bool, answer: Answer
) -> dict[str, Any]:
    logprob = token.logprob
    if logprob is not None and not math.isfinite(logprob):
        logprob = None
    if answer.tgi_names:
        return {"id": token.token_id, "text": token.text, "logprob": logprob, "special": special}
    if answer.release <= Release.V0_27:
        members = {
            "id": [token.token_id] if answer.release == Release.V0_27 else token.token_id,
            "text": token.text,
            "log_prob": logprob,
            "special_token": special,
        }
        return {name: value for name, value in members.items() if value}
    result: dict[str, Any] = {"id": token.token_id, "text": token.text, "log_prob": logprob}
    if special:
        result["special_token"] = True
    return result


def _number(value: float | None) -> str:
    return "null" if value is None or not math.isfinite(value) else repr(value)


def _dumps_indented(value: object) -> bytes:
    text = json.dumps(value, ensure_ascii=False, indent=2, separators=(",", ":"))
    return text.encode("utf-8", "replace")
