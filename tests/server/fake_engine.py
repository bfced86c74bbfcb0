"""A scripted engine: deterministic words, limits, errors and delays, without a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from lmi_core.engine.outputs import FinishReason, PromptToken, TokenEvent, TokenLogprob
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.stats import EngineInfo, EngineStats, EngineTotals, LifeState
from lmi_core.errors import CapacityError, EngineError, ModelError, UserError
from lmi_core.runners.runner import RunnerInfo

VOCAB_SIZE = 1000
WORDS = (" a", " fox", ' "quoted"', "\n", " é", " 漢字", " back\\slash", " end")


@dataclass(slots=True)
class FakeEngine:
    """Choice c of a request says WORDS[c], WORDS[c + 1], ...; one prompt token per word."""

    delay_s: float = 0.0
    """Between two batches."""
    batch_size: int = 1
    max_model_len: int = 4096
    max_running: int = 1000
    fail_after: int | None = None
    """Tokens after which every request fails; 0: before the first."""
    crash_after: int | None = None
    """The same with an error that nobody expects."""
    text: str | None = None
    """Every token's text, instead of WORDS."""
    healthy: bool = True
    tokenizer: Any = None
    running: set[str] = field(default_factory=set)
    aborted: list[str] = field(default_factory=list)
    requests: list[GenerationRequest] = field(default_factory=list)
    num_tokens: int = 0
    startup_adapters: dict[str, Path] = field(default_factory=dict)
    """What the engine loads when it starts."""
    adapters: dict[str, Path] = field(default_factory=dict)
    broken_adapters: frozenset[Path] = frozenset()

    async def __aenter__(self) -> Self:
        self.adapters = dict(self.startup_adapters)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert not self.running

    async def load_adapter(self, name: str, path: Path) -> None:
        if path in self.broken_adapters:
            raise ModelError(f"{path}/adapter_config.json is missing")
        if name in self.adapters:
            raise UserError(f"Adapter {name} is registered already", field="adapter")
        self.adapters[name] = path

    async def unload_adapter(self, name: str) -> None:
        del self.adapters[name]

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            model="model",
            max_prompt_tokens=self.max_model_len - 1,
            max_total_tokens=self.max_model_len,
            eos_token_ids=(),
            runner=RunnerInfo(
                vocab_size=VOCAB_SIZE,
                max_model_len=self.max_model_len,
                max_num_seqs=self.max_running,
                max_num_batched_tokens=0,
                max_logit_rows=0,
                max_logprobs=0,
                num_blocks=0,
                block_size=0,
            ),
        )

    def stats(self) -> EngineStats:
        num_running = len(self.running)
        return EngineStats(
            state=LifeState.READY,
            is_healthy=self.healthy,
            num_running=num_running,
            num_waiting=0,
            num_blocks=100,
            num_used_blocks=num_running,
            num_cached_blocks=7,
            num_free_blocks=93 - num_running,
            totals=EngineTotals(
                num_requests=len(self.requests),
                num_prompt_tokens=11,
                num_cached_tokens=5,
                num_generated_tokens=self.num_tokens,
            ),
        )

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        return range(1, 1 + len(text.split()))

    def decode(self, token_ids: Sequence[int]) -> str:
        if not all(0 <= token_id < VOCAB_SIZE for token_id in token_ids):
            raise UserError("there is no such token id", field="prompt")
        return "".join(WORDS[token_id % len(WORDS)] for token_id in token_ids)

    async def generate_batches(
        self, request: GenerationRequest
    ) -> AsyncGenerator[Sequence[TokenEvent], None]:
        num_prompt_tokens = self._check(request)
        self.requests.append(request)
        self.running.add(request.request_id)
        finished = False
        try:
            if request.echo:
                yield [_prompt_event(request)]
            batch: list[TokenEvent] = []
            for event in self._events(request, num_prompt_tokens):
                batch.append(event)
                if len(batch) >= self.batch_size * request.params.n:
                    await asyncio.sleep(self.delay_s)
                    yield batch
                    batch = []
            if batch:
                yield batch
            finished = True
        finally:
            self.running.discard(request.request_id)
            if not finished:
                self.aborted.append(request.request_id)

    def _check(self, request: GenerationRequest) -> int:
        request.params.validate(vocab_size=VOCAB_SIZE, max_logprobs=20)
        if request.adapter and request.adapter not in self.adapters:
            raise UserError(f"Adapter {request.adapter} is not registered", field="adapter")
        if request.prompt is not None:
            num_tokens = len(request.prompt.split())
        else:
            num_tokens = len(request.prompt_token_ids or ())
        max_new_tokens = request.params.max_new_tokens or 1
        if num_tokens + max_new_tokens > self.max_model_len:
            raise UserError(
                f"The prompt has {num_tokens} tokens and max_new_tokens is {max_new_tokens}; "
                f"together at most {self.max_model_len} fit"
            )
        if len(self.running) >= self.max_running:
            raise CapacityError(f"{len(self.running)} requests run", retry_after_s=2.0)
        return num_tokens

    def _events(self, request: GenerationRequest, num_prompt_tokens: int):  # type: ignore[no-untyped-def]
        params = request.params
        length = params.max_new_tokens or 1
        for position in range(length):
            if position == self.fail_after:
                raise EngineError("step 7 failed: no such kernel")
            if position == self.crash_after:
                raise ZeroDivisionError("secret detail")
            for choice in range(params.n):
                self.num_tokens += 1
                yield self._event(request, choice, position, num_prompt_tokens)

    def _event(
        self, request: GenerationRequest, choice: int, position: int, num_prompt_tokens: int
    ) -> TokenEvent:
        params = request.params
        word_id = (choice + position) % len(WORDS)
        is_last = position + 1 == params.max_new_tokens
        return TokenEvent(
            request_id=request.request_id,
            choice=choice,
            token_id=word_id,
            text=self.text or WORDS[word_id],
            logprob=-0.5 / (choice + 1) if params.logprobs is not None else None,
            top=tuple(
                TokenLogprob(word_id + rank, f"t{rank}", -0.5 - rank)
                for rank in range(params.logprobs or 0)
            ),
            special=WORDS[word_id] == " end",
            num_prompt_tokens=num_prompt_tokens,
            num_cached_tokens=num_prompt_tokens // 2,
            num_generated_tokens=position + 1,
            finish_reason=FinishReason.LENGTH if is_last else None,
        )


def _prompt_event(request: GenerationRequest) -> TokenEvent:
    words = (request.prompt or "").split()
    return TokenEvent(
        request_id=request.request_id,
        choice=0,
        token_id=-1,
        text="",
        prompt=tuple(
            PromptToken(index, word, None if index == 0 else -1.5, (), (index and 4) or None)
            for index, word in enumerate(words)
        ),
    )
