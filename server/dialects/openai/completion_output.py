"""Completion responses: one object, or chunks as lines or server-sent events."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring as quote
from typing import Any

from lmi_core.engine.outputs import PromptToken, TokenEvent, TokenLogprob
from lmi_server.dialects.base import Renderer
from lmi_server.dialects.best_of import Likelihood
from lmi_server.dialects.encode import encoded
from lmi_server.dialects.openai.output import (
    TEXT,
    Answer,
    Usage,
    finish_word,
    finite,
)

_KIND = "text_completion"


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """The prompts' texts, which come before the generated ones."""

    prompts: tuple[str, ...]
    without_output: bool = False
    """The prompts alone come back, with their log-probabilities if asked for."""


@dataclass(slots=True)
class _Logprobs:
    """OpenAI's four parallel lists; offsets count characters of the choice's text."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add(
        self,
        token: TokenEvent | PromptToken,
        logprob: float | None,
        offset: int,
        name_of: Callable[[TokenEvent | PromptToken | TokenLogprob], str],
    ) -> None:
        self.tokens.append(name_of(token))
        self.token_logprobs.append(logprob)
        self.text_offset.append(offset)
        if logprob is None:
            self.top_logprobs.append(None)
            return
        # The token itself is always among the most likely ones.
        ranked: list[TokenLogprob | TokenEvent | PromptToken] = [*token.top, token]
        top: dict[str, float] = {}
        for entry in ranked:
            top.setdefault(name_of(entry), finite(entry.logprob))
        self.top_logprobs.append(top)

    def render(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }


class _Echoed:
    """The log-probabilities of a prompt, made once for all its choices, and only when the first is
    shown: of a long prompt with the likeliest tokens, that takes long."""

    def __init__(
        self,
        prompt: Sequence[PromptToken],
        text: str,
        name_of: Callable[[TokenEvent | PromptToken | TokenLogprob], str],
    ) -> None:
        self._prompt = prompt
        self._text = text
        self._name_of = name_of
        self._logprobs: _Logprobs | None = None

    def before(self, output: _Logprobs) -> _Logprobs:
        """A choice's log-probabilities, the prompt's before its output's."""
        if self._logprobs is None:
            self._logprobs = _Logprobs()
            for token, offset in zip(self._prompt, _offsets(self._prompt, self._text), strict=True):
                self._logprobs.add(token, token.logprob, offset, self._name_of)
        prompt = self._logprobs
        return _Logprobs(
            prompt.tokens + output.tokens,
            prompt.token_logprobs + output.token_logprobs,
            prompt.top_logprobs + output.top_logprobs,
            prompt.text_offset + output.text_offset,
        )


def _offsets(tokens: Sequence[PromptToken], text: str) -> Iterator[int]:
    """Where each token begins in ``text``: tokens that aren't shown there, as one that begins every
    text, take no place, and those that are parts of characters begin with the first of these."""
    offset, num_unseen = 0, 0
    for token in tokens:
        piece = token.text
        if not offset and not text.startswith(piece) and text.startswith(piece.removeprefix(" ")):
            piece = piece.removeprefix(" ")  # SentencePiece begins every text with it
        if num_unseen and "\ufffd" not in piece:
            end = offset + num_unseen + len(piece)
            offset = max(offset, text.find(piece, offset, end))
        yield offset
        if piece and text.startswith(piece, offset):
            offset, num_unseen = offset + len(piece), 0
        else:
            num_unseen += 1


class _Choice:
    """Text and log-probabilities that are to be sent: all of them, or a chunk's."""

    __slots__ = (
        "echoed",
        "finish_reason",
        "has_begun",
        "likelihood",
        "logprobs",
        "num_chars",
        "prompt",
        "tells_prompt",
        "texts",
        "token_ids",
    )

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.prompt: Sequence[PromptToken] | None = None
        self.tells_prompt = True
        """Nothing was said of its prompt yet."""
        self.logprobs = _Logprobs()
        self.echoed: _Echoed | None = None
        """What comes before these."""
        self.likelihood = Likelihood()
        self.num_chars = 0
        self.finish_reason: str | None = None
        self.has_begun = False

    def add_text(self, text: str) -> None:
        self.texts.append(text)
        self.num_chars += len(text)

    def take(self) -> tuple[str, _Logprobs]:
        text, logprobs = "".join(self.texts), self.logprobs
        if self.echoed is not None:
            logprobs = self.echoed.before(logprobs)
        self.texts, self.logprobs, self.echoed = [], _Logprobs(), None
        return text, logprobs


class _Collector:
    """The sequences of every prompt, filled from events."""

    def __init__(self, answer: Answer, echo: Echo | None, num_candidates: int) -> None:
        self.answer = answer
        self.echo = echo
        self.num_candidates = num_candidates
        self.usage = Usage()
        self.candidates = [_Choice() for _ in range(answer.num_prompts * num_candidates)]
        self._prompts: dict[int, Sequence[PromptToken]] = {}
        self._echoed: dict[int, _Echoed] = {}

    def add(self, index: int, event: TokenEvent) -> int | None:
        """The number of the sequence that the event belongs to; None: it is about the prompt."""
        if event.prompt is not None:
            self._prompts[index] = event.prompt
            return None
        number = index * self.num_candidates + event.choice
        choice = self.candidates[number]
        if not choice.has_begun:
            choice.has_begun = True
            choice.prompt = self._prompts.get(index)
            if self.echo is not None:
                self._begin_with_prompt(choice, index, self.echo.prompts[index])
        if event.finish_reason is not None:
            choice.finish_reason = finish_word(event.finish_reason)
        self.usage.add(event)
        choice.likelihood.add(event)
        if self.echo is not None and self.echo.without_output:
            self.usage.num_generated_tokens = 0
            choice.finish_reason = "length"
            return number
        if self.answer.logprobs and event.token_id >= 0:
            name_of = self.answer.token_name
            choice.logprobs.add(event, finite(event.logprob), choice.num_chars, name_of)
        if event.token_id >= 0:
            choice.token_ids.append(event.token_id)
        choice.add_text(event.text)
        return number

    def _begin_with_prompt(self, choice: _Choice, index: int, prompt: str) -> None:
        choice.add_text(prompt)
        if self.answer.logprobs and choice.prompt:
            if index not in self._echoed:
                self._echoed[index] = _Echoed(choice.prompt, prompt, self.answer.token_name)
            choice.echoed = self._echoed[index]

    def choices(self) -> list[_Choice]:
        """Those to return of every prompt: all in order, or the best, the likeliest first."""
        if self.num_candidates == self.answer.num_choices:
            return self.candidates
        chosen = []
        for begin in range(0, len(self.candidates), self.num_candidates):
            candidates = self.candidates[begin : begin + self.num_candidates]
            candidates.sort(key=lambda choice: -choice.likelihood.mean_logprob)
            chosen += candidates[: self.answer.num_choices]
        return chosen

    def objects(self) -> Iterator[dict[str, Any]]:
        """What is to be sent of each choice, of which nothing is kept behind it: what many prompts
        with log-probabilities hold would else end at once, with the interpreter's lock."""
        choices = deque(self.choices())
        self.candidates, self._prompts, self._echoed = [], {}, {}
        for number in range(len(choices)):
            yield self.object(number, choices.popleft())

    def object(self, number: int, choice: _Choice) -> dict[str, Any]:
        """What is to be sent of a choice."""
        text, logprobs = choice.take()
        shown = _shown(number, text, choice.finish_reason)
        if self.answer.logprobs:
            shown["logprobs"] = logprobs.render()
        if self.answer.token_ids:
            shown["token_ids"], choice.token_ids = choice.token_ids, []
        if choice.tells_prompt:
            choice.tells_prompt = False
            shown |= self.answer.prompt_fields(choice.prompt)
        return shown


def _shown(number: int, text: str, finish_reason: str | None = None) -> dict[str, Any]:
    """A choice whose log-probabilities aren't told."""
    return {"index": number, "text": text, "logprobs": None, "finish_reason": finish_reason}


class CompletionRenderer(Renderer):
    """One ``text_completion`` object at the end."""

    streams = False
    content_type = "application/json"

    def __init__(self, answer: Answer, echo: Echo | None = None, *, num_candidates: int) -> None:
        """``num_candidates``: sequences per prompt, of which the best are returned."""
        self._answer = answer
        self._collector = _Collector(answer, echo, num_candidates)

    def feed(self, index: int, events: Sequence[TokenEvent]) -> bytes:
        for event in events:
            self._collector.add(index, event)
        return b""

    def finish(self) -> bytes:
        collector = self._collector
        value = {
            **self._answer.head(_KIND),
            "choices": collector.objects(),
            "usage": collector.usage.render(),
        }
        return encoded(value, compact=self._answer.compact)

    def error(self, error: Exception) -> bytes:
        return self._answer.error(error)


class CompletionStreamRenderer(Renderer):
    """``text_completion`` objects as server-sent events or lines.

    Most chunks differ in their text alone, so they are made of a template around it.
    """

    streams = True

    def __init__(self, answer: Answer, echo: Echo | None = None) -> None:
        self.content_type = answer.stream_type
        self._answer = answer
        tells_more = answer.logprobs or echo or answer.token_ids or answer.usage_in_chunks
        self._collector = _Collector(answer, echo, answer.num_choices) if tells_more else None
        self._usage = Usage() if self._collector is None else self._collector.usage
        self._templates = [
            answer.around_text(self._object([_shown(number, TEXT)]))
            for number in range(answer.num_prompts * answer.num_choices)
        ]

    def feed(self, index: int, events: Sequence[TokenEvent]) -> bytes:
        frames = []
        first_choice = index * self._answer.num_choices
        for event in events:
            if self._collector is None:
                self._usage.add(event)
                number = first_choice + event.choice
                if event.finish_reason is not None:
                    shown = _shown(number, event.text, finish_word(event.finish_reason))
                    frames.append(self._answer.frame(self._object([shown])))
                elif event.text:  # half a character, or of a stop string, is held back
                    before, after = self._templates[number]
                    frames.append(f"{before}{quote(event.text)}{after}")
            elif (place := self._collector.add(index, event)) is not None:
                choice = self._collector.candidates[place]
                is_long = choice.tells_prompt and choice.prompt is not None
                shown = self._collector.object(place, choice)
                frames.append(self._answer.frame(self._object([shown]), is_long=is_long))
        return (frames[0] if len(frames) == 1 else "".join(frames)).encode()

    def finish(self) -> bytes:
        end = self._answer.stream_end
        if self._answer.usage:
            end = self._answer.frame(self._object([], self._usage.render())) + end
        return end.encode()

    def error(self, error: Exception) -> bytes:
        return self._answer.framed(self._answer.error(error).decode()).encode()

    def _object(
        self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        chunk = {**self._answer.head(_KIND), "choices": choices}
        if self._answer.usage_in_chunks:
            chunk["usage"] = self._usage.render()
        elif self._answer.usage:
            chunk["usage"] = usage
        return chunk


def completion_renderer(
    answer: Answer, echo: Echo | None, *, streams: bool, num_candidates: int
) -> Renderer:
    """``num_candidates``: as ``CompletionRenderer`` has it."""
    if streams:
        return CompletionStreamRenderer(answer, echo)
    return CompletionRenderer(answer, echo, num_candidates=num_candidates)
