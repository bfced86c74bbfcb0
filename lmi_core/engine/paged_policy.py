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
    budget. Without memory the newest running sequence is preempted and computed again later. The
    scheduler asks for these in turn, and takes in whom the policy names.

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
        self._tried: tuple[Sequence, int, int] | None = None
        """The sequence that was tried last; the blocks available and sequences running then."""
        self._refusal: tuple[Sequence, int, int] | None = None
        """The same of one that found no memory: while these stay as they are, it isn't tried again.
        """

    def begin(self, *, keeps_all: bool) -> bool:
        """Look at who is there, before a step is planned. Unless everybody who runs keeps its
        place, one gives way to one that waits, where it should; whether one did."""
        self._look_at_shares()
        self._num_heavy_rows = self._num_light_rows = 0
        creditor = None if keeps_all else self._creditor()
        if creditor is not None:
            self.preempt(creditor)
        return creditor is not None

    @property
    def holds_back(self) -> bool:
        """Whether nobody is to be admitted for some steps."""
        return bool(self.queues.running) and self._num_held_steps < self._waiting_steps

    def pass_step(self) -> None:
        """A step goes by with which nobody comes in."""
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
        return self._room(sequence) == self._refusal or not self._has_rows(sequence)

    def _room(self, sequence: Sequence) -> tuple[Sequence, int, int]:
        """The blocks available and sequences running now, when it is tried."""
        return sequence, self._memory.pool.num_available, len(self.queues.running)

    def decode(self, plan: Plan) -> None:
        """Give every sequence with one pending token its row."""
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
        plan.num_rows_left = self._info.max_logit_rows - len(sequences)

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

    def prompts(self, plan: Plan) -> list[Sequence]:
        """Those in progress, where tenants have shares in the order of these."""
        failed = [sequence for sequence, _ in plan.failures]
        running = self.queues.running
        prompts = [s for s in running if not s.num_scheduled and s not in failed]
        return sorted(prompts, key=self.queues.order) if self.queues.are_contested else prompts

    def next_in(self, plan: Plan, before: Sequence | None) -> Sequence | None:
        """Who of those that wait comes in with the step if there is memory, at ``before`` only one
        whose tenant was served less than that one's."""
        queues, memory = self.queues, self._memory
        if not (queues.waiting and memory.num_free_rows and plan.num_rows_left):
            return None
        sequence = queues.first()
        if self._num_tokens_left(plan, sequence) <= 0:
            return None
        if before is not None and queues.order(sequence) > queues.order(before):
            return None
        if self._takes_whole and not self._fits(sequence, plan):
            return None
        if self._lacks_room(sequence):
            return None
        if _awaits(sequence, plan.behind, memory):
            plan.must_wait = True
            return None
        self._tried = self._room(sequence)
        return sequence

    def note_refused(self) -> None:
        """Whom ``next_in`` gave found no memory."""
        self._refusal = self._tried

    def note_admitted(self) -> None:
        """Whom ``next_in`` gave is in memory."""
        self._num_held_steps = 0

    def _has_rows(self, sequence: Sequence) -> bool:
        """Whether there are rows for its gang, beside those that others will want."""
        searching = [s for s in self.queues.running if s.request.search is not None]
        wanted = sum(running.num_rows_wanted for running in searching)
        wanted += sequence.num_rows_wanted + len(sequence.gang)
        return wanted <= self._memory.num_free_rows

    def _fits(self, sequence: Sequence, plan: Plan) -> bool:
        return sequence.num_pending <= self._info.max_num_batched_tokens - plan.num_tokens

    def num_spare_blocks(self) -> int:
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
            most, num_decoding = max(1, most * 5 // 9), 2 * num_decoding
        num_spent = min(num_decoding, most // 2) + plan.num_prompt_tokens + self._num_heavy_rows
        return max(0, min(left, most - num_spent))

    def schedule(self, sequence: Sequence, plan: Plan) -> None:
        """Schedule as many pending tokens as budget and logit rows allow, maybe none."""
        num_pending, num_logit_rows = sequence.num_pending, plan.num_rows_left
        if not num_pending:  # it waits for the others of its gang
            return
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
        plan.num_rows_left = num_logit_rows - num_rows


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
