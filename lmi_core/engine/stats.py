"""Figures about a running engine: counters to read, and moments to observe."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from enum import StrEnum
from typing import Protocol, TypeVar

from lmi_core.engine.outputs import FinishReason
from lmi_core.models.pooling_head import PoolingHead
from lmi_core.runners.runner import RunnerInfo

T = TypeVar("T")

_log = logging.getLogger(__name__)


class LifeState(StrEnum):
    """Where an engine is in its life; it never goes back."""

    CREATED = "created"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"


@dataclass(slots=True)
class EngineTotals:
    """Counts since the start."""

    num_requests: int = 0
    num_finished_requests: int = 0
    """Completed, aborted or failed."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""
    num_generated_tokens: int = 0
    num_steps: int = 0
    num_failed_steps: int = 0
    num_preemptions: int = 0
    num_drafts: int = 0
    """Times that a sequence was given draft tokens for a step."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Of the draft tokens; each spares its sequence a step."""
    num_grammar_draft_tokens: int = 0
    num_grammar_accepted_tokens: int = 0
    """Of the draft tokens, those that a grammar left no choice about."""
    num_model_draft_tokens: int = 0
    num_model_accepted_tokens: int = 0
    """Of the draft tokens, those of a draft model; all others are from texts."""
    step_seconds: float = 0.0
    """From submit to the loop's notice of completion, summed."""
    native_seconds: float = 0.0
    """By the worker's clock, summed."""
    num_weight_bytes: int = 0
    """That steps have read of weights; of experts all count."""

    @classmethod
    def sum(cls, parts: Iterable[EngineTotals]) -> EngineTotals:
        """Of several engines."""
        counts = [astuple(part) for part in parts]
        return cls(*map(sum, zip(*counts, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot; blocks are free (no content), used, or cached (unused, content hit-able)."""

    state: LifeState
    is_healthy: bool
    num_running: int
    """Sequences that have a row in the batch."""
    num_waiting: int
    """Requests of which nothing runs yet."""
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
    totals: EngineTotals


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What was decided at load."""

    model: str
    """The name it is served under."""
    max_prompt_tokens: int
    """Longest prompt that leaves room for one new token."""
    max_total_tokens: int
    """Prompt and output together."""
    eos_token_ids: tuple[int, ...]
    runner: RunnerInfo
    head: PoolingHead | None = None
    """What is behind the pooling of a model that pools."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One completed step."""

    num_tokens: int
    num_seqs: int
    seconds: float
    """From submit to the loop's notice of completion."""
    native_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request that ended without a failure."""

    seconds: float
    """From its arrival to its last token."""
    queue_seconds: float
    """From its arrival to its first step."""
    num_prompt_tokens: int
    num_generated_tokens: int
    """Of all choices."""


class EngineObserver(Protocol):
    """Told about each moment as it happens, in the engine's loop thread: must be quick."""

    def on_step(self, step: StepRecord) -> None: ...

    def on_first_token(self, seconds: float) -> None:
        """Time from a request's arrival to its first token."""
        ...

    def on_token_intervals(self, seconds: list[float]) -> None:
        """Times between two tokens of a choice, for every choice in a step."""
        ...

    def on_request(self, record: RequestRecord) -> None:
        """A request ended without a failure, before ``on_finish`` says so."""
        ...

    def on_finish(self, reason: FinishReason | None) -> None:
        """A request ended; None: it failed."""
        ...


class NullObserver:
    """Observes nothing."""

    def on_step(self, step: StepRecord) -> None:
        pass

    def on_first_token(self, seconds: float) -> None:
        pass

    def on_token_intervals(self, seconds: list[float]) -> None:
        pass

    def on_request(self, record: RequestRecord) -> None:
        pass

    def on_finish(self, reason: FinishReason | None) -> None:
        pass


def observe(method: Callable[[T], None], moment: T) -> None:
    """Call an observer's method, whose mistakes don't end what it observes."""
    try:
        method(moment)
    except Exception:
        _log.exception("an observer failed")
