"""Another library's engine in the place of ours: our requests, limits, texts and events."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self, cast

from lmi_core.adapters.names import AdapterNames
from lmi_core.backends.choice_text import ChoiceText
from lmi_core.backends.token_source import (
    AdapterSource,
    SampledToken,
    TokenBatch,
    TokenSource,
    Top,
)
from lmi_core.engine.outputs import FinishReason, PromptToken, TokenEvent, TokenLogprob
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.engine.stats import (
    EngineInfo,
    EngineObserver,
    EngineStats,
    EngineTotals,
    LifeState,
    NullObserver,
    RequestRecord,
)
from lmi_core.errors import CapacityError, EngineError, TaskError, UserError
from lmi_core.runners.runner import RunnerInfo
from lmi_core.settings.library_config import LibraryConfig
from lmi_core.text.prompt_errors import prompt_too_long
from lmi_core.text.stop import stop_strings
from lmi_core.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_USUAL = SamplingParams()
_OWN = {
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "bad_words": "bad_words",
    "bad_words_ids": "bad_words_ids",
    "watermark_delta": "watermark",
    "num_beams": "num_beams",
    "penalty_alpha": "penalty_alpha",
}
"""What only our own engine does, by the names that requests have for it."""


class LibraryEngine:
    """Checks, tokenizes and detokenizes around a ``TokenSource``."""

    def __init__(
        self,
        config: LibraryConfig,
        source: TokenSource,
        *,
        observer: EngineObserver | None = None,
    ) -> None:
        self.config = config
        self._source = source
        self._observer = observer or NullObserver()
        self._totals = EngineTotals()
        self._state = LifeState.CREATED
        self._num_open = 0
        self._num_running = 0
        self._tokenizer: Tokenizer | None = None
        self._adapters: AdapterNames[Path] = AdapterNames()

    async def __aenter__(self) -> Self:
        self._state = LifeState.LOADING
        try:
            self._tokenizer = await asyncio.to_thread(Tokenizer.load, self.config.model)
            await self._source.start()
            for name, path in () if self.config.lora is None else self.config.lora.adapters:
                await self.load_adapter(name, path)
        except BaseException:
            await self._close()
            raise
        self._state = LifeState.READY
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        self._state = LifeState.STOPPED
        await self._source.stop()
        if self._tokenizer is not None:
            self._tokenizer.close()

    @property
    def adapters(self) -> dict[str, Path]:
        """A snapshot of the registered adapters, in order of registration."""
        return dict(self._adapters.items())

    async def load_adapter(self, name: str, path: Path) -> None:
        """Register a LoRA adapter. Raises UserError for an empty or taken name and where LoRA is
        off, ModelError for one that the library doesn't take."""
        source = self._adapter_source()
        with self._adapters.claim(name):
            await source.load_adapter(name, path)
            self._adapters.add(name, path)

    async def unload_adapter(self, name: str) -> None:
        """Refuse an adapter to new requests; running ones finish."""
        source = self._adapter_source()
        self._adapters.remove(name)
        await source.unload_adapter(name)

    @property
    def healthy(self) -> bool:
        return self._state is LifeState.READY and self._source.healthy

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise EngineError(f"the engine is {self._state}; start it with 'async with'")
        return self._tokenizer

    @property
    def max_model_len(self) -> int:
        return self._source.max_model_len

    @property
    def info(self) -> EngineInfo:
        source, config = self._source, self.config
        return EngineInfo(
            model=config.served_model_name,
            max_prompt_tokens=source.max_model_len - 1,
            max_total_tokens=source.max_model_len,
            eos_token_ids=source.eos_token_ids,
            runner=RunnerInfo(
                vocab_size=source.vocab_size,
                max_model_len=source.max_model_len,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=0,
                max_logit_rows=0,
                max_logprobs=config.max_logprobs,
                num_blocks=0,
                block_size=0,
                dtype=source.dtype,
                device=config.backend,
                kernels=config.backend,
            ),
        )

    def stats(self) -> EngineStats:
        """Blocks and steps are the library's own business: they count as 0."""
        return EngineStats(
            state=self._state,
            is_healthy=self.healthy,
            num_running=self._num_running,
            num_waiting=self._num_open - self._num_running,
            num_blocks=0,
            num_used_blocks=0,
            num_cached_blocks=0,
            num_free_blocks=0,
            totals=replace(self._totals),
        )

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return await self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        self._check_ids(token_ids)
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    async def generate_batches(
        self, request: GenerationRequest
    ) -> AsyncGenerator[list[TokenEvent], None]:
        """As ``Engine.generate_batches``."""
        arrival_s = time.monotonic()
        if self.config.lora is not None and not request.adapter:
            request = replace(request, adapter=self.config.lora.default)
        self._check(request)
        request = replace(request, params=request.params.counted(self._source.vocab_size))
        self._num_open += 1
        self._totals.num_requests += 1
        run = _Run(self, request, arrival_s)
        try:
            async with aclosing(run.batches()) as batches:
                async for events in batches:
                    yield events
        finally:
            self._num_open -= 1
            self._num_running -= run.is_running
            self._totals.num_finished_requests += 1
            if run.outcome is not None:
                self._observer.on_request(run.record())
            self._observer.on_finish(run.outcome)

    def _check(self, request: GenerationRequest) -> None:
        if not self.healthy:
            raise EngineError(f"the {self.config.backend} engine is {self._state} or has failed")
        if (request.prompt is None) == (request.prompt_token_ids is None):
            raise UserError("give either prompt or prompt_token_ids", field="prompt")
        if request.pooling is not None:
            raise TaskError(
                f"the model {self.config.served_model_name!r} generates text by "
                f"{self.config.backend}; it has no embeddings here",
                field="model",
            )
        if request.adapter:
            self._adapter_source()
            self._adapters.find(request.adapter)
        request.params.validate(
            vocab_size=self._source.vocab_size, max_logprobs=self.config.max_logprobs
        )
        thinking = request.params.thinking
        if thinking is not None and not thinking.is_hint:
            raise UserError(
                f"{thinking.field} is not available with {self.config.backend}; leave it out",
                field=thinking.field,
            )
        for name, field in _OWN.items():
            if getattr(request.params, name) != getattr(_USUAL, name):
                raise UserError(
                    f"{field} is not available with {self.config.backend}; leave it out",
                    field=field,
                )
        limit = self.config.max_num_seqs + self.config.max_queue_size
        if self._num_open >= limit:
            raise CapacityError(
                f"{self._num_open} requests are running or waiting, at most {limit} may "
                "(job_queue_size and option.max_rolling_batch_size); retry later",
                retry_after_s=1.0,
            )

    def _adapter_source(self) -> AdapterSource:
        if self.config.lora is None:
            raise UserError("LoRA is not enabled", field="adapter")
        return cast(AdapterSource, self._source)

    def _check_ids(self, token_ids: Sequence[int]) -> None:
        vocab_size = self._source.vocab_size
        wrong = next((i for i in token_ids if not 0 <= i < vocab_size), None)
        if wrong is not None:
            raise UserError(
                f"token id {wrong} is out of vocabulary; allowed are 0 to {vocab_size - 1}",
                field="prompt_token_ids",
            )


class _Run:
    """One request."""

    def __init__(self, engine: LibraryEngine, request: GenerationRequest, arrival_s: float) -> None:
        self._engine = engine
        self._request = request
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
        engine, request = self._engine, self._request
        try:
            self._prompt_ids = await self._encode()
            engine._totals.num_prompt_tokens += len(self._prompt_ids)
            self._texts = await self._choices()
            if request.echo and request.params.prompt_logprobs is None:
                yield [self._prompt_event(tuple((i, None, ()) for i in self._prompt_ids))]
            source = engine._source.generate(
                self._bounded(), request.request_id, self._prompt_ids, self._seed
            )
            async with aclosing(source):
                async for batch in source:
                    events = self._events(batch)
                    if events:
                        yield events
                    if all(text.is_finished for text in self._texts):
                        return
            raise EngineError(f"{engine.config.backend} ended the request without its last token")
        except Exception:
            self.outcome = None
            raise

    async def _encode(self) -> list[int]:
        request, engine = self._request, self._engine
        longest = engine.max_model_len - 1
        if request.prompt_token_ids is not None:
            ids = list(request.prompt_token_ids)
            engine._check_ids(ids)
        else:
            assert request.prompt is not None
            ids = await engine.tokenizer.encode(
                request.prompt, add_special_tokens=request.add_special_tokens, max_tokens=longest
            )
        if not ids:
            raise UserError(
                "the prompt is empty: it must be provided and non-empty, of at least one token",
                field="prompt",
            )
        if len(ids) > longest:
            raise prompt_too_long(len(ids), longest)
        return ids

    def _bounded(self) -> GenerationRequest:
        params = self._request.params
        most = self._engine.max_model_len - len(self._prompt_ids)
        wanted = params.max_new_tokens
        length = most if wanted is None else min(wanted, most)
        return replace(self._request, params=replace(params, max_new_tokens=length))

    async def _choices(self) -> list[ChoiceText]:
        params = self._request.params
        stops = await stop_strings(params.stop)
        return [
            ChoiceText(
                params,
                self._engine.tokenizer.detokenizer(
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
            self._engine._observer.on_token_intervals(intervals_s)
        return events

    def _event(self, token: SampledToken, text: ChoiceText, intervals_s: list[float]) -> TokenEvent:
        engine, tokenizer = self._engine, self._engine.tokenizer
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
        engine._totals.num_generated_tokens += 1
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
            self._engine._num_running += 1
            self._engine._observer.on_first_token(now_s - self._arrival_s)
        elif self._last_s[choice]:
            intervals_s.append(now_s - self._last_s[choice])
        self._last_s[choice] = now_s

    def _prompt_event(self, prompt: Sequence[tuple[int, float | None, Top]]) -> TokenEvent:
        text_of = self._engine.tokenizer.token_text
        return TokenEvent(
            request_id=self._request.request_id,
            choice=0,
            token_id=-1,
            text="",
            num_prompt_tokens=len(self._prompt_ids),
            num_cached_tokens=self._num_cached,
            prompt=tuple(
                PromptToken(token_id, text_of(token_id), logprob, self._top(top))
                for token_id, logprob, top in prompt
            ),
        )

    def _top(self, top: Top) -> tuple[TokenLogprob, ...]:
        text_of = self._engine.tokenizer.token_text
        return tuple(TokenLogprob(token_id, text_of(token_id), value) for token_id, value in top)
