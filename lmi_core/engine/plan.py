"""A step from its decision to its delivery: what it is to compute, by which buffer, and what it
brought."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from lmi_core.engine.model_drafts import DraftChain
from lmi_core.engine.outputs import FinishReason
from lmi_core.engine.ranked_tokens import Ranked
from lmi_core.engine.sequence import ActiveRequest, Sequence, SequenceState
from lmi_core.structured.mask_threads import ANYTHING, MissingMask

if TYPE_CHECKING:
    import asyncio

    from lmi_core._native import Step


class HeldMask(NamedTuple):
    """A mask of a step behind one in flight, which follows the token that this one samples."""

    sequence: Sequence
    mask: MissingMask

    def is_wanted(self) -> bool:
        """Whether there is something to fill, once that token is taken: else the row samples
        freely, where its grammar has come to its end, or nothing, where the text has."""
        sequence = self.sequence
        if sequence.is_ending or sequence.state is not SequenceState.RUNNING:
            self.mask.settle(None, sequence.error)
        elif sequence.matcher is None:
            self.mask.settle(ANYTHING, None)
        else:
            return True
        return False


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
class Plan:
    """One step, from what was chosen for it to what it brought. ``num_scheduled`` of each sequence
    says how many of its tokens it computes."""

    sequences: list[Sequence] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(source, target) blocks copied before the forward pass."""
    num_tokens: int = 0
    num_following: int = 0
    """Leading ``sequences`` of a step submitted ahead whose tokens are of the one before."""
    num_prompt_tokens: int = 0
    """Those of ``num_tokens`` that aren't of decoding sequences."""
    num_rows_left: int = 0
    """Logit rows that it may still have, while it is planned."""
    num_preempted: int = 0
    wants_states: bool = False
    """Whether the step's hidden states are of interest; never of a step submitted ahead."""
    chain: DraftChain | None = None
    """Draft steps that run before it, and give some of its tokens."""
    failures: list[tuple[Sequence, Exception]] = field(default_factory=list)
    """Sequences that planning itself failed for, which are in none of the lists above; once it is
    committed, those that this failed for, of whose requests all choices are finished."""
    behind: Items[Sequence] = ()
    """Those in flight in the step before, of which it is planned as if it had gone well."""
    must_wait: bool = False
    """Whether somebody would come in who has to know what that step gives; for nobody else."""
    expired: list[ActiveRequest] = field(default_factory=list)
    """Requests that waited for too long and were ended; they are in none of the lists above."""
    step: Step = field(init=False, repr=False)
    """The buffer that it was written into."""
    logit_rows: list[int] = field(default_factory=list)
    """Of a step submitted ahead: those of the one before that sample its token ids; -1: the id is
    known."""
    held: Items[HeldMask] = ()
    """Masks that follow these."""
    masks: Items[MissingMask] = ()
    """The others that it waits for."""
    submitted_s: float = 0.0
    done: asyncio.Future[None] = field(init=False, repr=False)
    """The worker is done with it."""
    completed_s: float = 0.0
    """When it was found to be, by ``time.monotonic``."""
    outputs: list[Output] = field(default_factory=list)
    """Of this and what follows nothing is there before it is committed."""
    prompt_chunks: list[PromptChunk] = field(default_factory=list)
    pooled: list[Sequence] = field(default_factory=list)
    """Sequences of which everything that is pooled is there."""
    searches: list[ActiveRequest] = field(default_factory=list)
    """Requests whose beam search has ended."""

    def take_copy(self, sequence: Sequence) -> None:
        """Have the block copied that the sequence goes on in, if it needs one."""
        if sequence.copy is not None:
            self.copies.append(sequence.copy)
            sequence.copy = None

    @property
    def chain_s(self) -> float:
        """Seconds that the worker spent on the chain, once it is done."""
        return 0.0 if self.chain is None else self.chain.seconds
