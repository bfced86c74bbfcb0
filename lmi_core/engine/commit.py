"""What a completed step brought."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from lmi_core.engine.outputs import FinishReason
from lmi_core.engine.ranked_tokens import Ranked
from lmi_core.engine.sequence import ActiveRequest, Sequence

if TYPE_CHECKING:
    from lmi_core._native import Step


class Output(NamedTuple):
    """A token that a step sampled; ``token_id`` -1: no token was possible."""

    sequence: Sequence
    token_id: int
    logit_row: int
    num_generated: int
    finish_reason: FinishReason | None
    known: tuple[float, Ranked] | None = None
    """Its log-probability and the likeliest tokens in its place; None: the logit row has them."""


class PromptChunk(NamedTuple):
    """Log-probabilities of prompt tokens: logit row ``logit_row + i`` is of token ``start + i``."""

    request: ActiveRequest
    logit_row: int
    start: int
    num_tokens: int
    is_last: bool


@dataclass(slots=True)
class Commit:
    """What a completed step brought, to be delivered."""

    step: Step
    completed_s: float = 0.0
    """When it was, by ``time.monotonic``; the loop says it."""
    outputs: list[Output] = field(default_factory=list)
    prompt_chunks: list[PromptChunk] = field(default_factory=list)
    pooled: list[Sequence] = field(default_factory=list)
    """Sequences of which everything that is pooled is there."""
    searches: list[ActiveRequest] = field(default_factory=list)
    """Requests whose beam search has ended."""
    failures: list[tuple[Sequence, Exception]] = field(default_factory=list)
    """Sequences that the commit itself failed for; all choices of their requests are finished."""
