"""Another library's engine in the place of ours: our requests, limits, texts and events."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self, cast

from lmi_core.adapters.names import AdapterNames
from lmi_core.backends.library_run import LibraryRun
from lmi_core.backends.token_source import AdapterSource, TokenSource
from lmi_core.engine.outputs import TokenEvent
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.engine.stats import (
    EngineInfo,
    EngineObserver,
    EngineStats,
    EngineTotals,
    LifeState,
    NullObserver,
    observe,
)
from lmi_core.errors import CapacityError, EngineError, TaskError, UserError
from lmi_core.runners.runner import RunnerInfo
from lmi_core.settings.library_config import LibraryConfig
from lmi_core.text.prompt_errors import check_token_ids
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
        self._runs: set[LibraryRun] = set()
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
        num_running = sum(run.is_running for run in self._runs)
        return EngineStats(
            state=self._state,
            is_healthy=self.healthy,
            num_running=num_running,
            num_waiting=len(self._runs) - num_running,
            num_blocks=0,
            num_used_blocks=0,
            num_cached_blocks=0,
            num_free_blocks=0,
            totals=replace(self._totals),
        )

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return await self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        check_token_ids(token_ids, self._source.vocab_size, field="prompt_token_ids")
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
        self._totals.num_requests += 1
        run = LibraryRun(
            request,
            self._source,
            self.tokenizer,
            backend=self.config.backend,
            totals=self._totals,
            observer=self._observer,
            arrival_s=arrival_s,
        )
        self._runs.add(run)
        try:
            async with aclosing(run.batches()) as batches:
                async for events in batches:
                    yield events
        finally:
            self._runs.remove(run)
            self._totals.num_finished_requests += 1
            if run.outcome is not None:
                observe(self._observer.on_request, run.record())
            observe(self._observer.on_finish, run.outcome)

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
        if request.max_queue_s not in (None, math.inf):
            raise UserError(
                f"max_queue_s is not available with {self.config.backend}; leave it out",
                field="max_queue_s",
            )
        request.params.validate(
            vocab_size=self._source.vocab_size, max_logprobs=self.config.max_logprobs
        )
        thinking = request.params.thinking
        if thinking is not None and not thinking.is_hint:
            raise UserError(
                f"{thinking.field} is not available with {self.config.backend}; leave it out",
                field=thinking.field,
            )
        params = request.params
        own = [f for name, f in _OWN.items() if getattr(params, name) != getattr(_USUAL, name)]
        own += [] if params.processors is None else params.processors.names
        for field in own[:1]:
            raise UserError(
                f"{field} is not available with {self.config.backend}; leave it out", field=field
            )
        limit = self.config.max_num_seqs + self.config.max_queue_size
        if len(self._runs) >= limit:
            raise CapacityError(
                f"{len(self._runs)} requests are running or waiting, at most {limit} may "
                "(job_queue_size and option.max_rolling_batch_size); retry later",
                retry_after_s=1.0,
            )

    def _adapter_source(self) -> AdapterSource:
        if self.config.lora is None:
            raise UserError("LoRA is not enabled", field="adapter")
        return cast(AdapterSource, self._source)
