"""The step behind one in flight, before anybody knows what tokens that one gives.

It is planned as if the one in flight had gone well: sequences decode on, prompts go on, and who
waits comes in. Where it failed, the step behind it is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lmi_core.engine.decoding import going_on, lacking_room
from lmi_core.engine.kv_memory import KvMemory
from lmi_core.engine.paged_policy import PagedPolicy
from lmi_core.engine.plan import Plan
from lmi_core.engine.sequence import Sequence
from lmi_core.engine.speculation import Speculation
from lmi_core.engine.step_filling import add_following, add_known
from lmi_core.structured.mask_threads import MissingMask

if TYPE_CHECKING:
    from lmi_core._native import Step

_UNKNOWN_ID = 0


class StepsAhead:
    """``plan``, then ``fill`` or ``cancel``; the scheduler takes it over, or drops it."""

    def __init__(
        self,
        memory: KvMemory,
        policy: PagedPolicy,
        speculation: Speculation | None,
        planned: Callable[[Items[Sequence]], Plan],
    ) -> None:
        """``planned``: gives the step behind sequences, which are as it leaves them."""
        self._planned = planned
        self._queues = policy.queues
        self._memory = memory
        self._policy = policy
        self._speculation = speculation
        self._is_for_decoding = speculation is not None and speculation.has_heads
        """Heads go on from what a step behind takes the place of, also of a prompt's end."""

    def plan(self, plan: Plan, now_s: float) -> Plan | None:
        """The step behind ``plan``, which is in flight. Sequences that speculate are in every
        second step: they need the results of theirs. None where results or the place of somebody
        who runs may matter."""
        queues = self._queues
        if queues.waiting and (self._policy.preempts() or queues.is_due(now_s)):
            return None
        behind = going_on(plan.sequences)
        if behind is None:
            return None
        following, prompts = behind
        if following and self._speculation is not None:
            if any(sequence.matcher is not None for sequence in following):
                return None  # what its grammar forces behind the token is a draft
            following = self._speculation.without_waiting(following)
            if not following:
                return None
        known = [sequence for sequence in queues.running if not sequence.num_scheduled]
        if any(sequence.request.search is not None for sequence in known):
            return None
        may_admit = queues.waiting and self._memory.num_free_rows
        if not (may_admit or prompts or any(s.num_pending != 1 for s in known)):
            return self._decode_on(following, known)
        return None if self._is_for_decoding else self._plan_all(plan, following, prompts)

    def _decode_on(self, following: list[Sequence], known: list[Sequence]) -> Plan | None:
        """What all plans come to while nobody comes, written out since it is done so often."""
        if not following:
            return None
        full = lacking_room(following, 1, self._memory.block_size)
        for sequence in full + lacking_room(known, 0, self._memory.block_size):
            if not self._memory.extend(sequence):
                return None  # a block that was taken is there for the next plan
        for sequence in known:
            sequence.num_scheduled = 1
        ahead = Plan(following + known, num_following=len(following))
        ahead.num_tokens = len(ahead.sequences)
        self._policy.pass_step()
        return ahead

    def _plan_all(
        self, plan: Plan, following: list[Sequence], prompts: list[Sequence]
    ) -> Plan | None:
        memory = self._memory
        with _as_if_done(plan.sequences, following, prompts):
            decoding = [s for s in self._queues.running if s.num_pending == 1]
            num_lacking = len(lacking_room(decoding, 0, memory.block_size))
            if num_lacking > memory.pool.num_available:
                return None
            ahead = self._planned(plan.sequences)
        if ahead.must_wait or not ahead.sequences:
            self.cancel(ahead)  # who was admitted is there for the next plan
            return None
        are_following = set(following)
        first = [sequence for sequence in ahead.sequences if sequence in are_following]
        ahead.num_following = len(first)
        ahead.sequences = first + [s for s in ahead.sequences if s not in are_following]
        return ahead

    def fill(self, ahead: Plan, step: Step) -> list[MissingMask]:
        """As ``step_filling.fill``; masks that follow the step in flight are held."""
        ahead.step = step
        step.clear()
        following = ahead.sequences[: ahead.num_following]
        known = ahead.sequences[ahead.num_following :]
        ahead.held = add_following(following, step)
        if self._speculation is not None:
            apart = [sequence for sequence in known if not sequence.num_ahead]
            self._speculation.add_drafts(ahead, apart, len(self._queues.running))
        masks = add_known(known, step, ahead.chain)
        if ahead.chain is not None:
            ahead.chain.lead_to(step)
        rows = [sequence.logit_row for sequence in following]
        ahead.logit_rows = rows + [-1] * (step.num_tokens - len(rows))
        return masks

    def cancel(self, ahead: Plan) -> None:
        """It isn't submitted."""
        for i, sequence in enumerate(ahead.sequences):
            if sequence.num_ahead or i < ahead.num_following:
                sequence.num_ahead = 0
            else:
                sequence.step_over()


@contextmanager
def _as_if_done(
    in_flight: list[Sequence], following: list[Sequence], prompts: list[Sequence]
) -> Iterator[None]:
    """Have sequences in flight be as they will be behind their step; what they are given is their
    part of the next one. Those that are neither ``following`` nor ``prompts`` get none."""
    before = [(s, s.num_computed, s.num_scheduled) for s in in_flight]
    for sequence in following:
        sequence.token_ids.append(_UNKNOWN_ID)
    for sequence in in_flight:
        sequence.num_computed, sequence.num_scheduled = len(sequence.token_ids), 0
    for sequence in following:
        sequence.num_computed -= 1
    goes_on = set(prompts)
    for sequence, num_computed, num_scheduled in before:
        if sequence in goes_on:
            sequence.num_computed = num_computed + num_scheduled
    try:
        yield
    finally:
        for sequence in following:
            sequence.token_ids.pop()
        for sequence, num_computed, num_scheduled in before:
            sequence.num_ahead, sequence.num_scheduled = sequence.num_scheduled, num_scheduled
            sequence.num_computed = num_computed
