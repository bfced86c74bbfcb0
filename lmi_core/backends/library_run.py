"""A request on its way through another library's engine."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from lmi_core.backends.choice_text import ChoiceText
from lmi_core.backends.token_source import (
    SampledToken,
    ScoredToken,
    TokenBatch,
    TokenSource,
    Top,
)
from lmi_core.engine.outputs import FinishReason, PromptTokens, TokenEvent, TokenLogprob
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.stats import EngineObserver, EngineTotals, RequestRecord, observe
from lmi_core.errors import EngineError
from lmi_core.text.prompt_errors import check_token_ids, empty_prompt, prompt_too_long
from lmi_core.text.stop import stop_strings
from lmi_core.text.tokenizer import Tokenizer


class LibraryRun:
    """One request to a library: its prompt's ids, its texts and its events."""

    def __init__(
        self,
        request: GenerationRequest,
        source: TokenSource,
        tokenizer: Tokenizer,
        *,
        backend: str,
        totals: EngineTotals,
        observer: EngineObserver,
        arrival_s: float,
    ) -> None:
        """``backend``: the library's name; ``totals``, of the engine, are counted up."""
        self._request = request
        self._source = source
        self._tokenizer = tokenizer
        self._backend = backend
        self._totals = totals
        self._observer = observer
        self._arrival_s = arrival_s
        self._last_s = [0.0] * request.params.n
        params = request.params
        self._seed = secrets.randbits(63) if params.seed is None else params.seed
        self._texts: list[ChoiceText] = []
        self._prompt_ids: list[int] = []
        self._num_cached = 0
        self._num_tokens = 0
        self.is_running = False
        self.outcome: FinishReason | None = FinishReason.ABORT
        """How it ended; None: it failed."""

    async def batches(self) -> AsyncGenerator[list[TokenEvent], None]:
        request = self._request
        try:
            self._prompt_ids = await self._encode()
            self._totals.num_prompt_tokens += len(self._prompt_ids)
            self._texts = await self._choices()
            if request.echo and request.params.prompt_logprobs is None:
                yield [self._prompt_event([ScoredToken(i, None) for i in self._prompt_ids])]
            source = self._source.generate(
                self._bounded(), request.request_id, self._prompt_ids, self._seed
            )
            async with aclosing(source):
                async for batch in source:
                    events = self._events(batch)
                    if events:
                        yield events
                    if all(text.is_finished for text in self._texts):
                        return
            raise EngineError(f"{self._backend} ended the request without its last token")
        except Exception:
            self.outcome = None
            raise

    async def _encode(self) -> list[int]:
        request = self._request
        longest = self._source.max_model_len - 1
        if request.prompt_token_ids is not None:
            ids = list(request.prompt_token_ids)
            check_token_ids(ids, self._source.vocab_size, field="prompt_token_ids")
        else:
            assert request.prompt is not None
            ids = await self._tokenizer.encode(
                request.prompt, add_special_tokens=request.add_special_tokens, max_tokens=longest
            )
        if not ids:
            raise empty_prompt()
        if len(ids) > longest:
            raise prompt_too_long(len(ids), longest)
        return ids

    def _bounded(self) -> GenerationRequest:
        params = self._request.params
        most = self._source.max_model_len - len(self._prompt_ids)
        wanted = params.max_new_tokens
        length = most if wanted is None else min(wanted, most)
        return replace(self._request, params=replace(params, max_new_tokens=length))

    async def _choices(self) -> list[ChoiceText]:
        params = self._request.params
        stops = await stop_strings(params.stop)
        return [
            ChoiceText(
                params,
                self._tokenizer.detokenizer(
                    skip_special_tokens=params.skip_special_tokens,
                    kept=params.kept_special_tokens,
                    context=self._prompt_ids,
                ),
                stops,
            )
            for _ in range(params.n)
        ]

    def _events(self, batch: TokenBatch) -> list[TokenEvent]:
        self._num_cached = self._num_cached or batch.num_cached_tokens
        events = []
        if batch.prompt is not None:
            events.append(self._prompt_event(batch.prompt))
        intervals_s: list[float] = []
        for token in batch.tokens:
            text = self._texts[token.choice]
            if not text.is_finished:
                events.append(self._event(token, text, intervals_s))
        if intervals_s:
            observe(self._observer.on_token_intervals, intervals_s)
        return events

    def _event(self, token: SampledToken, text: ChoiceText, intervals_s: list[float]) -> TokenEvent:
        tokenizer = self._tokenizer
        self._observe(token.choice, intervals_s)
        shown, reason, stop = text.push(token.token_id, token.finish_reason)
        event = TokenEvent(
            request_id=self._request.request_id,
            choice=token.choice,
            token_id=token.token_id,
            text=shown,
            special=token.token_id in tokenizer.special_ids,
            num_prompt_tokens=len(self._prompt_ids),
            num_cached_tokens=self._num_cached,
            num_generated_tokens=text.num_generated,
            finish_reason=reason,
            stop=stop,
            seed=self._seed if self._request.params.temperature > 0 else None,
        )
        if self._request.params.logprobs is not None:
            event.token = tokenizer.token_text(token.token_id)
            event.logprob = token.logprob
            event.top = self._top(token.top)
        if reason is not None:
            self.outcome = reason
        self._totals.num_generated_tokens += 1
        self._num_tokens += 1
        return event

    def record(self) -> RequestRecord:
        """The library's own queue isn't known: it is part of the time to the first token."""
        return RequestRecord(
            seconds=time.monotonic() - self._arrival_s,
            queue_seconds=0.0,
            num_prompt_tokens=len(self._prompt_ids),
            num_generated_tokens=self._num_tokens,
        )

    def _observe(self, choice: int, intervals_s: list[float]) -> None:
        now_s = time.monotonic()
        if not self.is_running:
            self.is_running = True
            observe(self._observer.on_first_token, now_s - self._arrival_s)
        elif self._last_s[choice]:
            intervals_s.append(now_s - self._last_s[choice])
        self._last_s[choice] = now_s

    def _prompt_event(self, prompt: Sequence[ScoredToken]) -> TokenEvent:
        return TokenEvent(
            request_id=self._request.request_id,
            choice=0,
            token_id=-1,
            text="",
            num_prompt_tokens=len(self._prompt_ids),
            num_cached_tokens=self._num_cached,
            prompt=PromptTokens(
                [token.token_id for token in prompt],
                self._tokenizer.token_text,
                [(token.logprob, self._top(token.top), token.rank) for token in prompt],
            ),
        )

    def _top(self, top: Top) -> tuple[TokenLogprob, ...]:
        text_of = self._tokenizer.token_text
        return tuple(TokenLogprob(token_id, text_of(token_id), value) for token_id, value in top)
