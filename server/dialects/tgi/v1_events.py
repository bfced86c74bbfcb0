"""TGI's chat and completion answers, byte by byte (its router/src/server.rs)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lmi_core.engine.outputs import TokenEvent
from lmi_server.dialects.base import Renderer
from lmi_server.dialects.tgi.compact_json import array, number, quote
from lmi_server.dialects.tgi.errors import (
    IncompleteGeneration,
    error_message,
    error_object,
    error_status,
)
from lmi_server.dialects.tgi.events import KEEP_ALIVE, Answer

_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What every object of a response repeats."""

    model: str
    fingerprint: str
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, kind: str) -> str:
        return f'"object":"{kind}","id":"","created":{self.created},{self.tail()}'

    def tail(self) -> str:
        return f'"model":{quote(self.model)},"system_fingerprint":{quote(self.fingerprint)}'


@dataclass(slots=True)
class _Text:
    """One prompt's answer as it grows."""

    pieces: list[str] = field(default_factory=list)
    logprobs: list[str] = field(default_factory=list)
    num_tokens: int = 0
    finish_reason: str | None = None


class _V1Renderer(Renderer):
    """Base of the four: several prompts, each with its answer and its text."""

    def __init__(self, identity: Identity, answers: Sequence[Answer]) -> None:
        self._identity = identity
        self._answers = answers
        self._texts = [_Text() for _ in answers]
        self._finished: list[int] = []
        """Numbers of the prompts in the order in which they ended."""

    def _note(self, index: int, event: TokenEvent) -> str | None:
        """Count an event; the finish reason when it is the last one of its prompt."""
        text = self._texts[index]
        text.num_tokens = event.num_generated_tokens
        self._answers[index].timing.observe(event)
        if event.finish_reason is not None:
            text.finish_reason = self._answers[index].finish_reason(event)
            self._finished.append(index)
        return text.finish_reason

    def _check_complete(self) -> None:
        if len(self._finished) < len(self._texts):
            raise IncompleteGeneration("not every sequence has ended")

    def _usage(self, indices: Sequence[int]) -> str:
        num_prompt = sum(self._answers[i].num_prompt_tokens for i in indices)
        num_generated = sum(self._texts[i].num_tokens for i in indices)
        return (
            f'{{"prompt_tokens":{num_prompt},"completion_tokens":{num_generated},'
            f'"total_tokens":{num_prompt + num_generated}}}'
        )


class _WholeRenderer(_V1Renderer):
    streams = False
    content_type = "application/json"

    def error(self, error: Exception) -> bytes:
        return error_object(error)

    def final_headers(self) -> Mapping[str, str]:
        first = self._answers[0]
        return first.timing.headers(
            num_prompt_tokens=sum(answer.num_prompt_tokens for answer in self._answers),
            num_generated_tokens=sum(text.num_tokens for text in self._texts),
        )


class _SseRenderer(_V1Renderer):
    streams = True
    content_type = "text/event-stream"
    starts_at_once = True
    keep_alive = KEEP_ALIVE

    def finish(self) -> bytes:
        if len(self._finished) < len(self._texts):
            return self.error(IncompleteGeneration("not every sequence has ended"))
        return _DONE

    def error(self, error: Exception) -> bytes:
        return v1_error_event(error, self._answers[0].version)


class ChatRenderer(_WholeRenderer):
    def feed(self, index: int, events: Sequence[TokenEvent]) -> bytes:
        text = self._texts[index]
        for event in events:
            self._note(index, event)
            text.pieces.append(event.text)
            if self._answers[index].shows_logprobs:
                text.logprobs.append(_logprob(self._answers[index], event))
        return b""

    def finish(self) -> bytes:
        self._check_complete()
        text = self._texts[0]
        logprobs = "null"
        if self._answers[0].shows_logprobs:
            logprobs = f'{{"content":{array(text.logprobs)}}}'
        return (
            f'{{{self._identity.head("chat.completion")},"choices":[{{"index":0,"message":'
            f"{self._message(''.join(text.pieces))},"
            f'"logprobs":{logprobs},"finish_reason":{quote(_openai_reason(text.finish_reason))}}}],'
            f'"usage":{self._usage([0])}}}'
        ).encode("utf-8", "replace")

    def _message(self, text: str) -> str:
        return f'{{"role":"assistant","content":{quote(text)}}}'


class ChatSseRenderer(_SseRenderer):
    def __init__(
        self, identity: Identity, answers: Sequence[Answer], *, includes_usage: bool
    ) -> None:
        super().__init__(identity, answers)
        self._includes_usage = includes_usage
        self._head = f'data: {{{identity.head("chat.completion.chunk")},"choices":['

    def feed(self, index: int, events: Sequence[TokenEvent]) -> bytes:
        return "".join([self._frame(event) for event in events]).encode("utf-8", "replace")

    def finish(self) -> bytes:
        last = super().finish()
        if last is not _DONE or not self._includes_usage:
            return last
        return f'{self._head}],"usage":{self._usage([0])}}}\n\n'.encode() + last

    def _frame(self, event: TokenEvent) -> str:
        return self._chunk(event, f'"content":{quote(event.text)}')

    def _chunk(self, event: TokenEvent, delta: str) -> str:
        """``delta``: what it has besides the role."""
        reason = self._note(0, event)
        finish = "null" if reason is None else quote(_openai_reason(reason))
        logprobs = "null"
        if self._answers[0].shows_logprobs:
            logprobs = f'{{"content":[{_logprob(self._answers[0], event)}]}}'
        return (
            f'{self._head}{{"index":0,"delta":{{"role":"assistant",{delta}}},'
            f'"logprobs":{logprobs},"finish_reason":{finish}}}],"usage":null}}\n\n'
        )


class CompletionRenderer(_WholeRenderer):
    def feed(self, index: int, events: Sequence[TokenEvent]) -> bytes:
        for event in events:
            self._note(index, event)
            self._texts[index].pieces.append(event.text)
        return b""

    def finish(self) -> bytes:
        """Choices stand in the order in which they ended, as TGI has them."""
        self._check_complete()
        choices = [
            f'{{"index":{i},"text":{quote("".join(self._texts[i].pieces))},"logprobs":null,'
            f'"finish_reason":{quote(_openai_reason(self._texts[i].finish_reason))}}}'
            for i in self._finished
        ]
        return (
            f'{{{self._identity.head("text_completion")},"choices":{array(choices)},'
            f'"usage":{self._usage(self._finished)}}}'
        ).encode("utf-8", "replace")

    def final_headers(self) -> Mapping[str, str]:
        headers = dict(super().final_headers())
        del headers["x-compute-time"]
        return headers


class CompletionSseRenderer(_SseRenderer):
    """Special tokens' own texts are streamed here, as TGI does."""

    def __init__(self, identity: Identity, answers: Sequence[Answer]) -> None:
        super().__init__(identity, answers)
        created = identity.created
        self._head = f'data: {{"object":"text_completion","id":"","created":{created},"choices":['
        self._last_head = f'data: {{{identity.head("text_completion")},"choices":['
        self._tail = f"],{identity.tail()}}}\n\n"

    def feed(self, index: int, events: Sequence[TokenEvent]) -> bytes:
        return "".join([self._frame(index, e) for e in events]).encode("utf-8", "replace")

    def _frame(self, index: int, event: TokenEvent) -> str:
        text = event.text
        if event.special:
            text += self._answers[index].tokenizer.token_text(event.token_id)
        reason = self._note(index, event)
        choice = (
            f'{{"index":{index},"text":{quote(text)},"logprobs":null,'
            f'"finish_reason":{quote(reason or "")}}}'
        )
        if reason is None:
            return self._head + choice + self._tail
        return f'{self._last_head}{choice}],"usage":{self._usage([index])}}}\n\n'


def v1_error_event(error: Exception, version: int) -> bytes:
    """The end of a stream that failed: release 3 has OpenAI's form, with the error's own status."""
    if version < 3:
        body = error_object(error, streams=True, version=version)
    else:
        text = quote(error_message(error))
        status = error_status(error)
        body = f'{{"error":{{"message":{text},"http_status_code":{status}}}}}'.encode(
            "utf-8", "replace"
        )
    return b"data: " + body + b"\n\n" + _DONE


def _openai_reason(reason: str | None) -> str:
    return "stop" if reason == "eos_token" else reason or ""


def _logprob(answer: Answer, event: TokenEvent) -> str:
    top = array(_entry(token.text, token.logprob) + "}" for token in event.top)
    return f'{_entry(answer.text(event), event.logprob)},"top_logprobs":{top}}}'


def _entry(text: str, logprob: float | None) -> str:
    return f'{{"token":{quote(text)},"logprob":{number(logprob)}'
