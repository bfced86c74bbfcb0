"""Responses of ``/generate`` and ``/generate_stream``, byte by byte.

(TGI's router/src/server.rs.) Log-probabilities are those of the model's own distribution,
before temperature and penalties.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lmi_core.engine.outputs import FinishReason, PromptToken, TokenEvent, TokenLogprob
from lmi_core.text.tokenizer import Tokenizer
from lmi_server.dialects.base import Renderer
from lmi_server.dialects.best_of import Likelihood
from lmi_server.dialects.tgi.compact_json import array, boolean, number, quote
from lmi_server.dialects.tgi.errors import IncompleteGeneration, error_object

KEEP_ALIVE = b":\n\n"


@dataclass(slots=True, kw_only=True)
class Timing:
    """Moments of one call, by ``time.perf_counter``."""

    started_s: float
    validated_s: float
    queue_s: float = 0.0
    """The longest that one of the call's prompts waited to be run."""

    def observe(self, event: TokenEvent) -> None:
        self.queue_s = max(self.queue_s, event.queue_seconds)

    def headers(self, *, num_prompt_tokens: int, num_generated_tokens: int) -> dict[str, str]:
        """The headers of a finished call."""
        now_s = time.perf_counter()
        inference_ms = _milliseconds(max(0.0, now_s - self.validated_s - self.queue_s))
        return {
            "x-compute-time": f"{now_s - self.started_s:.9f}",
            "x-total-time": str(_milliseconds(now_s - self.started_s)),
            "x-validation-time": str(_milliseconds(self.validated_s - self.started_s)),
            "x-queue-time": str(_milliseconds(self.queue_s)),
            "x-inference-time": str(inference_ms),
            "x-time-per-token": str(inference_ms // max(1, num_generated_tokens)),
            "x-prompt-tokens": str(num_prompt_tokens),
            "x-generated-tokens": str(num_generated_tokens),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a call wants to be told, and what rendering it takes."""

    tokenizer: Tokenizer
    timing: Timing
    max_new_tokens: int
    num_prompt_tokens: int
    prefix: str = ""
    """Goes in front of the generated text: the prompt, or nothing."""
    details: bool = False
    prefill: bool = False
    """Report the prompt's tokens."""
    top_tokens: bool = False
    shows_logprobs: bool = False
    """Whether chats report log-probabilities."""
    num_sequences: int = 1
    as_list: bool = False
    """Answer a list of one object."""
    version: int = 2

    def token(self, event: TokenEvent) -> str:
        """A token object."""
        return _token(event.token_id, self.text(event), event.logprob, event.special)

    def text(self, event: TokenEvent) -> str:
        """A token's text; a special one shows its own, which is no part of the answer's."""
        return self.tokenizer.token_text(event.token_id) if event.special else event.text

    def top(self, tokens: Sequence[TokenLogprob]) -> str:
        special_ids = self.tokenizer.special_ids
        return array(
            _token(token.token_id, token.text, token.logprob, token.token_id in special_ids)
            for token in tokens
        )

    def finish_reason(self, event: TokenEvent) -> str:
        """The length counts first, also when the last token ends the text in another way."""
        if event.finish_reason is FinishReason.ABORT:
            raise IncompleteGeneration("the request was ended")
        if event.num_generated_tokens >= self.max_new_tokens:
            return "length"
        return str(event.finish_reason)


@dataclass(slots=True)
class _Sequence:
    texts: list[str] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    top_tokens: list[str] = field(default_factory=list)
    prefill: Sequence[PromptToken] = ()
    likelihood: Likelihood = field(default_factory=Likelihood)
    num_tokens: int = 0
    seed: int | None = None
    finish_reason: str | None = None

    def details(self, answer: Answer) -> str:
        """Without the braces."""
        seed = "null" if self.seed is None else self.seed
        return (
            f'"finish_reason":{quote(self.finish_reason or "")},'
            f'"generated_tokens":{self.num_tokens},"seed":{seed},'
            f'"prefill":{array(map(_prompt_token, self.prefill))},"tokens":{array(self.tokens)}'
        )

    def top(self) -> str:
        return f',"top_tokens":{array(self.top_tokens)}' if any(self.top_tokens) else ""


class JsonRenderer(Renderer):
    """One object at the end; of several sequences, the likeliest with the others in its details."""

    streams = False
    content_type = "application/json"

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._sequences = [_Sequence() for _ in range(answer.num_sequences)]
        self._finished: list[_Sequence] = []
        """In the order in which they ended."""

    def feed(self, index: int, events: Sequence[TokenEvent]) -> bytes:
        sequence = self._sequences[index]
        for event in events:
            if event.prompt is not None:
                sequence.prefill = event.prompt
            else:
                self._add(sequence, event)
        return b""

    def finish(self) -> bytes:
        if len(self._finished) < len(self._sequences):
            raise IncompleteGeneration("not every sequence has ended")
        best = self._best()
        text = f'{{"generated_text":{quote(self._text(best))}{self._details(best)}}}'
        return (f"[{text}]" if self._answer.as_list else text).encode("utf-8", "replace")

    def error(self, error: Exception) -> bytes:
        return error_object(error)

    def final_headers(self) -> Mapping[str, str]:
        answer = self._answer
        return answer.timing.headers(
            num_prompt_tokens=answer.num_prompt_tokens,
            num_generated_tokens=self._best().num_tokens,
        )

    def _add(self, sequence: _Sequence, event: TokenEvent) -> None:
        answer = self._answer
        sequence.texts.append(event.text)
        sequence.num_tokens = event.num_generated_tokens
        answer.timing.observe(event)
        sequence.likelihood.add(event)
        sequence.seed = event.seed
        if event.finish_reason is not None:
            sequence.finish_reason = answer.finish_reason(event)
            self._finished.append(sequence)
        if answer.details:
            sequence.tokens.append(answer.token(event))
        if answer.top_tokens:
            sequence.top_tokens.append(answer.top(event.top))

    def _best(self) -> _Sequence:
        """The first of those that are equally likely."""
        return max(self._finished, key=lambda sequence: sequence.likelihood.mean_logprob)

    def _text(self, sequence: _Sequence) -> str:
        return self._answer.prefix + "".join(sequence.texts)

    def _details(self, best: _Sequence) -> str:
        answer = self._answer
        if not answer.details:
            return ""
        others = [
            f'{{"generated_text":{quote(self._text(sequence))},'
            f"{sequence.details(answer)}{sequence.top()}}}"
            for sequence in self._finished
            if sequence is not best
        ]
        candidates = f',"best_of_sequences":{array(others)}' if others else ""
        return f',"details":{{{best.details(answer)}{candidates}{best.top()}}}'


class SseRenderer(Renderer):
    """An event per token; the last one carries the whole text. Errors are events too."""

    streams = True
    content_type = "text/event-stream"
    starts_at_once = True
    keep_alive = KEEP_ALIVE

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._texts: list[str] = []
        self._has_ended = False

    def feed(self, index: int, events: Sequence[TokenEvent]) -> bytes:
        return "".join([self._frame(event) for event in events]).encode("utf-8", "replace")

    def finish(self) -> bytes:
        if self._has_ended:
            return b""
        return self.error(IncompleteGeneration("the sequence has not ended"))

    def error(self, error: Exception) -> bytes:
        return error_event(error, self._answer.version)

    def _frame(self, event: TokenEvent) -> str:
        answer = self._answer
        self._texts.append(event.text)
        top = f',"top_tokens":{answer.top(event.top)}' if answer.top_tokens and event.top else ""
        tail = '"generated_text":null,"details":null'
        if event.finish_reason is not None:
            tail = self._last(event)
        return (
            f'data: {{"index":{event.num_generated_tokens},"token":{answer.token(event)}{top},'
            f"{tail}}}\n\n"
        )

    def _last(self, event: TokenEvent) -> str:
        answer = self._answer
        reason = answer.finish_reason(event)
        self._has_ended = True
        details = "null"
        if answer.details:
            seed = "null" if event.seed is None else event.seed
            details = (
                f'{{"finish_reason":{quote(reason)},'
                f'"generated_tokens":{event.num_generated_tokens},"seed":{seed},'
                f'"input_length":{answer.num_prompt_tokens}}}'
            )
        text = answer.prefix + "".join(self._texts)
        return f'"generated_text":{quote(text)},"details":{details}'


def error_event(error: Exception, version: int) -> bytes:
    """An application error inside a stream."""
    return b"data: " + error_object(error, streams=True, version=version) + b"\n\n"


def _token(token_id: int, text: str, logprob: float | None, special: bool) -> str:
    return (
        f'{{"id":{token_id},"text":{quote(text)},"logprob":{number(logprob)},'
        f'"special":{boolean(special)}}}'
    )


def _prompt_token(token: PromptToken) -> str:
    return f'{{"id":{token.token_id},"text":{quote(token.text)},"logprob":{number(token.logprob)}}}'


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)
