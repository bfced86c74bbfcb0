"""Continuous batching over a paged KV cache: one token budget, no phases."""

from __future__ import annotations

from collections.abc import Sequence as Items

from lmi_core.engine.kv_memory import KvMemory
from lmi_core.engine.plan import Plan
from lmi_core.engine.queues import Queues
from lmi_core.engine.sequence import Sequence
from lmi_core.runners.runner import RunnerInfo

_RANKED_OF_A_ROW = 20
"""A prompt's row with so many more of the likeliest tokens counts as one more: taking all of a step
over would hold the event loop."""


class PagedPolicy:
    """Decode rows first, then prompts in progress, then waiting sequences, in chunks that fill the
    budget. Without memory the newest running sequence is preempted and computed again later.

    Where many rows in one step are no cheaper than in several steps, only a prompt that has the
    step for itself fills the budget. Prompts that share it, or have decode rows beside them, take
    no more rows than make the step efficient, of which decode rows leave them at least half: so
    prompts are finished in the order of arrival, not all with the last one, and decoding goes on
    meanwhile.

    Who is more urgent than a running sequence doesn't wait for its end: where rows or memory lack,
    the least urgent gives way, one a step.

    Among several tenants, prompts are computed and rows are given in the order of what each was
    served, and a tenant that holds more rows than its part gives them to one that waits with less.
    Beside light tenants (``Queues.heavy``) steps are shorter, those of a light one's prompt
    have no rows of heavy ones, and these decode in what is left of others.
    """

    def __init__(
        self,
        info: RunnerInfo,
        memory: KvMemory,
        *,
        guaranteed_no_evict: bool,
        waiting_steps: int = 0,
    ) -> None:
        """``waiting_steps``: steps after an admission in which nobody else is admitted, as long as
        anything runs."""
        self._info = info
        self.queues = Queues()
        self._memory = memory
        pooling = info.pooling
        self._takes_whole = pooling is not None and not pooling.is_causal
        """A step has all of a prompt, which must fit, or nothing."""
        self._keeps_spare = not guaranteed_no_evict
        self._waiting_steps = waiting_steps
        self._heavy: frozenset[Sequence] = frozenset()
        self._num_heavy_rows = self._num_light_rows = 0
        """What runs of heavy tenants beside light ones; how many of it decode in the step so far,
        and how many rows of light ones' prompts it has."""
        self._num_held_steps = 0
        """Steps since the last admission, as far as they count for ``waiting_steps``."""
        self._refusal: tuple[Sequence, int, int] | None = None
        """The sequence that last found no memory; the blocks available and sequences running then:
        while these stay as they are, it isn't tried again."""

    def plan(self, behind: Items[Sequence] = ()) -> Plan:
        """The next step; empty when nothing can run. ``behind``: sequences in flight, which are as
        they will be when their step has gone well, beside enough memory for those that decode."""
        plan = Plan(behind=behind)
        self._look_at_shares()
        self._num_heavy_rows = self._num_light_rows = 0
        # Who is in flight keeps its place.
        creditor = None if behind else self._creditor()
        if creditor is not None:
            self.preempt(creditor)
        num_logit_rows = self._decode(plan)
        prompts = self._prompts(plan)
        is_held = not plan.num_preempted and self._holds_back()
        admits = not plan.num_preempted and not is_held
        if self.queues.are_contested:
            num_logit_rows = self._share(plan, prompts, num_logit_rows, admits=admits)
        else:
            for sequence in prompts:
                num_logit_rows = self._schedule_chunk(sequence, plan, num_logit_rows)
        if admits:
            self._admit(plan, num_logit_rows)
        plan.num_preempted += creditor is not None
        if is_held and plan.sequences:  # else it is no step
            self.pass_step()
        return plan

    def pass_step(self) -> None:
        """A step goes by that ``plan`` wasn't asked for: the last one's sequences decode on."""
        self._num_held_steps += 1

    def preempts(self) -> bool:
        """Whether somebody who waits takes the place of one that runs, if it were planned now."""
        self._look_at_shares()
        return self._creditor() is not None

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's memory, and its gang's; it waits to be computed again."""
        queues = self.queues
        first, *others = sequence.gang
        if first.request.search is not None:
            first.request.search.forget(first.token_ids)
        for member in (first, *others):
            queues.running.remove(member)
            self._memory.release(member)
        queues.wait(first)
        for member in others:
            queues.hold(member)

    def _look_at_shares(self) -> None:
        self._heavy = self.queues.heavy(self._info.max_num_seqs)

    def _creditor(self) -> Sequence | None:
        """A sequence that gives way to one that waits: a less urgent one, or one whose tenant has
        too many rows, where there is none for another's."""
        queues = self.queues
        if (
            not self._keeps_spare
            or not queues.waiting
            or not queues.running
            or self._num_held_steps < self._waiting_steps
        ):
            return None
        if queues.running[-1].key[0] > queues.waiting[0].key[0]:
            return queues.last() if self._lacks_room(queues.first()) else None
        if not queues.are_contested or self._memory.num_free_rows:
            return None
        return queues.creditor(self._info.max_num_seqs)

    def _lacks_room(self, sequence: Sequence) -> bool:
        """Whether rows are missing for its gang, or memory was when it was last tried."""
        num_running = len(self.queues.running)
        state = (sequence, self._memory.pool.num_available, num_running)
        return state == self._refusal or not self._has_rows(sequence)

    def _decode(self, plan: Plan) -> int:
        """Give every sequence with one pending token its row; returns the logit rows left."""
        block_size, heavy = self._memory.block_size, self._heavy
        sequences = plan.sequences
        # A copy: preemption takes sequences off the end.
        for sequence in self.queues.running[:]:
            num_computed = sequence.num_computed
            if len(sequence.token_ids) - num_computed != 1 or sequence.row < 0:
                continue
            if num_computed == len(sequence.block_ids) * block_size and not self._grow(
                sequence, plan
            ):
                continue
            if heavy and sequence in heavy:
                continue
            sequence.num_scheduled = 1
            sequences.append(sequence)
        for sequence in [sequence for sequence in sequences if sequence.copy is not None]:
            plan.take_copy(sequence)
        plan.num_tokens = len(sequences)
        return self._info.max_logit_rows - len(sequences)

    def _grow(self, sequence: Sequence, plan: Plan) -> bool:
        """One more block, at the cost of the newest sequences; False if it was the newest, or
        failed."""
        while not self._extend(sequence, plan):
            if plan.failures and plan.failures[-1][0] is sequence:
                return False
            victim = self.queues.last()
            for member in victim.gang:
                if member.num_scheduled:
                    plan.sequences.remove(member)
                    member.num_scheduled = 0
            self.preempt(victim)
            plan.num_preempted += 1
            if sequence.row < 0:
                return False
        return True

    def _extend(self, sequence: Sequence, plan: Plan) -> bool:
        try:
            return self._memory.extend(sequence)
        except Exception as error:  # one sequence's fault must not end the others
            plan.failures.append((sequence, error))
            return False

    def _prompts(self, plan: Plan) -> list[Sequence]:
        """Those in progress."""
        failed = [sequence for sequence, _ in plan.failures]
        running = self.queues.running
        return [s for s in running if not s.num_scheduled and s not in failed]

    def _share(
        self, plan: Plan, prompts: list[Sequence], num_logit_rows: int, *, admits: bool
    ) -> int:
        """Continue prompts in the order of their tenants' shares, but behind those that wait and
        come before them; returns the logit rows left."""
        for sequence in sorted(prompts, key=self.queues.order):
            if admits:
                num_logit_rows = self._admit(plan, num_logit_rows, before=sequence)
            num_logit_rows = self._schedule_chunk(sequence, plan, num_logit_rows)
        return num_logit_rows

    def _holds_back(self) -> bool:
        return bool(self.queues.running) and self._num_held_steps < self._waiting_steps

    def _admit(self, plan: Plan, num_logit_rows: int, before: Sequence | None = None) -> int:
        """Take waiting sequences in, those whose tenants were served less than that of ``before``;
        returns the logit rows left."""
        queues, memory = self.queues, self._memory
        while queues.waiting and memory.num_free_rows and num_logit_rows:
            sequence = queues.first()
            if self._num_tokens_left(plan, sequence) <= 0:
                break
            if before is not None and queues.order(sequence) > queues.order(before):
                break
            if self._takes_whole and not self._fits(sequence, plan):
                break
            state = (sequence, memory.pool.num_available, len(queues.running))
            if state == self._refusal or not self._has_rows(sequence):
                break
            if _awaits(sequence, plan.behind, self._memory):
                plan.must_wait = True
                break
            try:
                has_memory = memory.admit(sequence, num_spare_blocks=self._num_spare_blocks())
            except Exception as error:  # those behind it are admitted by the next step
                plan.failures.append((sequence, error))
                break
            if not has_memory:
                self._refusal = state
                break
            queues.note_admitted(sequence)
            self._num_held_steps = 0
            for member in sequence.gang:
                plan.take_copy(member)
                queues.run(member)
                num_logit_rows = self._schedule_chunk(member, plan, num_logit_rows)
        return num_logit_rows

    def _has_rows(self, sequence: Sequence) -> bool:
        """Whether there are rows for its gang, beside those that others will want."""
        searching = [s for s in self.queues.running if s.request.search is not None]
        wanted = sum(running.num_rows_wanted for running in searching)
        wanted += sequence.num_rows_wanted + len(sequence.gang)
        return wanted <= self._memory.num_free_rows

    def _fits(self, sequence: Sequence, plan: Plan) -> bool:
        return sequence.num_pending <= self._info.max_num_batched_tokens - plan.num_tokens

    def _num_spare_blocks(self) -> int:
        """Blocks kept for running sequences to grow into, so that one which is admitted isn't
        preempted a few steps later."""
        num_running = len(self.queues.running)
        if not self._keeps_spare or not num_running:
            return 0
        return max(num_running, self._memory.pool.num_blocks // 100)

    def _is_light(self, sequence: Sequence) -> bool:
        return bool(self._heavy) and self.queues.is_light(sequence)

    def _num_tokens_left(self, plan: Plan, sequence: Sequence) -> int:
        """For a prompt, or a decoding sequence of a heavy tenant, which is the step's next one."""
        left = self._info.max_num_batched_tokens - plan.num_tokens
        most = self._info.num_saturating_tokens
        is_light = self._is_light(sequence)
        if most is None or (plan.num_tokens == 0 and (is_light or not self._heavy)):
            return left
        num_decoding = plan.num_tokens - plan.num_prompt_tokens
        if is_light:
            most = most * 13 // 20
        elif self._heavy:
            if self._num_light_rows:
                return 0
            # With its keys and logits a decoding row costs two of a prompt's.
            most, num_decoding = most * 5 // 9, 2 * num_decoding
        num_spent = min(num_decoding, most // 2) + plan.num_prompt_tokens + self._num_heavy_rows
        return max(0, min(left, most - num_spent))

    def _schedule_chunk(self, sequence: Sequence, plan: Plan, num_logit_rows: int) -> int:
        """Schedule as many pending tokens as budget and logit rows allow, maybe none."""
        num_pending = sequence.num_pending
        if not num_pending:  # it waits for the others of its gang
            return num_logit_rows
        num_tokens = min(num_pending, self._num_tokens_left(plan, sequence))
        if self._takes_whole:
            num_tokens = num_pending
        if sequence.is_scoring_prompt:
            num_ranked = sequence.request.request.params.prompt_logprobs or 0
            weight = 1 if self._takes_whole else max(1, num_ranked // _RANKED_OF_A_ROW)
            num_tokens = min(num_tokens, num_logit_rows, max(1, num_logit_rows // weight))
            num_rows = min(num_tokens * weight, num_logit_rows)
        elif num_tokens == num_pending and not num_logit_rows:
            num_tokens, num_rows = num_tokens - 1, 0
        else:
            num_rows = int(num_tokens == num_pending)
        if num_tokens > 0:
            sequence.num_scheduled = num_tokens
            plan.sequences.append(sequence)
            plan.num_tokens += num_tokens
            plan.num_prompt_tokens += num_tokens
            self._num_heavy_rows += num_pending == 1 and sequence in self._heavy
            self._num_light_rows += num_tokens * self._is_light(sequence)
        return num_logit_rows - num_rows


def _awaits(sequence: Sequence, in_flight: Items[Sequence], memory: KvMemory) -> bool:
    """Whether a waiting sequence shares what a step in flight computes, which those that are in it
    are taken to have: its request's prompt or search, or another's block, which is cached then."""
    if not in_flight:
        return False
    if sequence.request.search is not None or (sequence.choice and not sequence.num_generated):
        return True
    hashes = memory.usable_hashes(sequence)
    for other in in_flight:
        num_filled = min(other.num_computed // memory.block_size, len(other.hashes), len(hashes))
        i = other.num_published
        if i < num_filled and other.hashes[i] == hashes[i]:
            return True
    return False
