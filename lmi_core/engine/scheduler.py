"""Sequences from arrival to release, around the steps that compute them."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

from lmi_core.engine.decoding import take_plain
from lmi_core.engine.kv_memory import KvMemory
from lmi_core.engine.paged_policy import PagedPolicy
from lmi_core.engine.plan import Output, Plan, PromptChunk
from lmi_core.engine.searches import SearchMoves
from lmi_core.engine.sequence import ActiveRequest, Sequence, SequenceState
from lmi_core.engine.speculation import Speculation
from lmi_core.engine.steps_ahead import StepsAhead
from lmi_core.weights.formats import FloatArray


class Scheduler:
    """A state machine without I/O: ``plan``, then ``commit`` or ``fail`` of the step filled by it
    (step_filling.py), in turn. ``ahead`` plans the step behind while one is in flight."""

    def __init__(
        self,
        memory: KvMemory,
        policy: PagedPolicy,
        speculation: Speculation | None = None,
    ) -> None:
        self.queues = policy.queues
        self.memory = memory
        self._block_size = memory.block_size
        self._policy = policy
        self._speculation = speculation
        self._searches = SearchMoves(self.queues, memory, self._preempt)
        self.ahead = StepsAhead(memory, policy, speculation, self._planned)
        self.num_preemptions = 0
        self.num_restoring = 0
        """Sequences that are RESTORING."""

    @property
    def num_running(self) -> int:
        return len(self.queues.running)

    @property
    def num_waiting(self) -> int:
        return len(self.queues.waiting) + self.queues.num_held + self.num_restoring

    @property
    def num_running_requests(self) -> int:
        return len({sequence.request for sequence in self.queues.running})

    @property
    def has_work(self) -> bool:
        return bool(self.queues.running or self.queues.waiting)

    def add(self, sequences: list[Sequence], *, is_restoring: bool = False) -> None:
        """Queue a request's open choices; all but the first are held until the prompt is computed,
        unless there is output already, with which each is computed for itself. The first is held
        until ``restored``, if its prefix ``is_restoring``."""
        request = sequences[0].request
        left = [s for s in sequences if s.state is not SequenceState.FINISHED]
        has_output = any(sequence.num_generated for sequence in sequences)
        self.queues.open(left)
        if not (is_restoring and request.is_impatient):
            self.queues.limit(request)
        for i, sequence in enumerate(left):
            if request.adapter is not None:
                request.adapter.acquire()
            if i and (not has_output or request.search is not None):
                self.queues.hold(sequence)
            elif is_restoring:
                self.num_restoring += 1
                sequence.state = SequenceState.RESTORING
            else:
                self.queues.wait(sequence)

    def restored(self, request: ActiveRequest) -> None:
        """What could be read of its prefix is in the pool; nothing happens if it has ended."""
        first = request.sequences[0]
        if first.state is SequenceState.RESTORING:
            self.num_restoring -= 1
            self.queues.wait(first)
            if request.is_impatient:
                self.queues.limit(request)

    def plan(self, now_s: float) -> Plan:
        """Decide the next step; empty when nothing can run. ``now_s``: for those that may wait only
        so long, as ``arrival_s`` counts."""
        plan = self._planned()
        # Who begins with this step is in time: no wait at all is for those that find a place.
        plan.expired = self.queues.take_due(now_s)
        for request in plan.expired:
            self.finish_all(request.sequences)
        searching = [s for s in plan.sequences if s.request.search is not None]
        plan.wants_states = any(sequence.request.wants_states for sequence in searching)
        self.num_preemptions += plan.num_preempted
        if self._speculation is not None:
            self._speculation.add_drafts(plan, plan.sequences, self.num_running)
        return plan

    def _planned(self, behind: Items[Sequence] = ()) -> Plan:
        """The next step; empty when nothing can run. ``behind``: sequences in flight, which are as
        they will be when their step has gone well, beside enough memory for those that decode."""
        policy, plan = self._policy, Plan(behind=behind)
        # Who is in flight keeps its place.
        gave_way = policy.begin(keeps_all=bool(behind))
        policy.decode(plan)
        is_held = not plan.num_preempted and policy.holds_back
        admits = not plan.num_preempted and not is_held
        for sequence in policy.prompts(plan):
            if admits and self.queues.are_contested:
                self._admit(plan, before=sequence)
            policy.schedule(sequence, plan)
        if admits:
            self._admit(plan)
        plan.num_preempted += gave_way
        if is_held and plan.sequences:  # an empty one is no step
            policy.pass_step()
        return plan

    def _admit(self, plan: Plan, before: Sequence | None = None) -> None:
        """Take in whom the policy names, as long as there is memory."""
        policy, queues = self._policy, self.queues
        while (sequence := policy.next_in(plan, before)) is not None:
            num_spare_blocks = policy.num_spare_blocks()
            try:
                has_memory = self.memory.admit(sequence, num_spare_blocks=num_spare_blocks)
            except Exception as error:  # those behind it are admitted by the next step
                plan.failures.append((sequence, error))
                break
            if not has_memory:
                policy.note_refused()
                break
            queues.note_admitted(sequence)
            policy.note_admitted()
            for member in sequence.gang:
                plan.take_copy(member)
                queues.run(member)
                policy.schedule(member, plan)

    def commit(self, plan: Plan, rows: FloatArray | None = None) -> None:
        """Take over a completed step: append tokens, publish blocks, release what ended. ``rows``
        [rows, hidden]: what a model that pools has given for logit rows; the hidden states of token
        rows, if ``plan.wants_states``."""
        plan.failures = []
        sampled = plan.step.sampled()
        if self._speculation is not None:
            self._speculation.settle(plan)
        states = _states_by_sequence(plan, rows) if plan.wants_states else {}
        memory, outputs = self.memory, plan.outputs
        contested = self.queues if self.queues.are_contested else None
        for sequence in plan.sequences:
            try:
                output = take_plain(sequence, sampled, memory, contested)
                if output is not None:
                    outputs.append(output)
                elif sequence.request.search is not None:
                    self._commit_search(sequence, states.get(sequence), plan)
                elif sequence.row_sum is None:
                    self._commit_one(sequence, sampled, plan)
                else:
                    assert rows is not None
                    self._commit_pooled(sequence, rows, plan)
            except Exception as error:  # one request's fault must not end the others
                plan.failures.append((sequence, error))
                self.finish_all(sequence.request.sequences)

    def keep_states(self, plan: Plan, states: FloatArray | None) -> None:
        """The hidden states [L, hidden] of a committed step's logit rows, for heads that draft."""
        if self._speculation is not None:
            self._speculation.keep_states(plan, states)

    def _commit_pooled(self, sequence: Sequence, rows: FloatArray, plan: Plan) -> None:
        logit_row, num_tokens = sequence.logit_row, sequence.num_scheduled
        end = self._step_over(sequence)
        if sequence.is_ending:
            self._release(sequence)
            return
        assert sequence.row_sum is not None
        if logit_row >= 0:
            sequence.row_sum.add(rows[logit_row:], num_tokens)
        if end == sequence.num_prompt:
            self.finish(sequence)
            plan.pooled.append(sequence)

    def _step_over(self, sequence: Sequence) -> int:
        """Note that the sequence's part of a step is computed; returns how many tokens are, without
        its drafts."""
        num_tokens = sequence.num_scheduled - len(sequence.drafts)
        sequence.step_over()
        sequence.num_computed = end = sequence.num_computed + num_tokens
        # A sequence that ended may have gone on by a token that nobody knows.
        if end <= len(sequence.token_ids):
            self._publish(sequence)
        return end

    def _commit_one(self, sequence: Sequence, sampled: list[int], plan: Plan) -> None:
        drafts, logit_row = sequence.drafts, sequence.logit_row
        start = sequence.num_computed
        end = self._step_over(sequence)
        if sequence.is_ending:
            if not sequence.num_scheduled:
                self._release(sequence)
            return
        if logit_row < 0:
            return
        request = sequence.request
        if request.is_scoring_prompt and sequence.is_scoring_prompt:
            num_scored = self._commit_scores(sequence, logit_row, start, end - start, plan)
            if request.is_scoring_prompt:
                return
            logit_row += num_scored
        if end == sequence.num_prompt:
            self._release_held(request)
        plan.outputs.append(self._append(sequence, sampled[logit_row], logit_row))
        sequence.note_plain()
        if drafts:
            self._commit_drafts(sequence, drafts, sampled, plan)

    def _commit_search(self, sequence: Sequence, states: FloatArray | None, plan: Plan) -> None:
        ranked = None if sequence.logit_row < 0 else plan.step.top(sequence.logit_row)
        self._step_over(sequence)
        if sequence.is_ending:
            self._release(sequence)
        elif self._searches.go_on(sequence, ranked, states, plan):
            self.finish_all(sequence.request.sequences)

    def _preempt(self, sequence: Sequence) -> None:
        self._policy.preempt(sequence)
        self.num_preemptions += 1

    def _publish(self, sequence: Sequence) -> None:
        num_new = sequence.num_computed - sequence.num_published * self._block_size
        if num_new >= self._block_size:
            self.memory.publish(sequence)

    def _commit_drafts(
        self, sequence: Sequence, drafts: list[int], sampled: list[int], plan: Plan
    ) -> None:
        """Go on from row to row as long as what one sampled is what the next one computed."""
        num_accepted = 0
        for draft in drafts:
            output = plan.outputs[-1]
            if output.token_id != draft or output.finish_reason is not None:
                break
            num_accepted += 1
            sequence.num_computed += 1
            self._publish(sequence)
            row = output.logit_row + 1
            plan.outputs.append(self._append(sequence, sampled[row], row))
        if sequence.state is SequenceState.RUNNING:
            self.memory.give_back(sequence)
        if self._speculation is not None:
            self._speculation.count(sequence, len(drafts), num_accepted)

    def _commit_scores(
        self, sequence: Sequence, logit_row: int, start: int, num_tokens: int, plan: Plan
    ) -> int:
        """Note the scored tokens of the prompt, and how many there are."""
        is_complete = sequence.num_computed == len(sequence.token_ids)
        num_scored = num_tokens - is_complete
        plan.prompt_chunks.append(
            PromptChunk(sequence.request, logit_row, start + 1, num_scored, is_complete)
        )
        sequence.request.is_scoring_prompt = not is_complete
        return num_scored

    def _append(self, sequence: Sequence, token_id: int, logit_row: int) -> Output:
        reason = sequence.take(token_id)
        if token_id >= 0:
            self.queues.note_generated(sequence)
        if reason is not None:
            self.finish(sequence)
        elif sequence.needs_observe and not sequence.num_scheduled:  # a step behind does so itself
            self.memory.observe(sequence, token_id)
        return Output(sequence, token_id, logit_row, sequence.num_generated, reason)

    def fail(self, plan: Plan) -> list[ActiveRequest]:
        """Give up a failed step: nothing of it is published. Returns the requests it served, all of
        whose choices are finished."""
        requests = dict.fromkeys(sequence.request for sequence in plan.sequences)
        for sequence in plan.sequences:
            sequence.step_over()
            if sequence.is_ending and not sequence.num_scheduled:
                self._release(sequence)
        for request in requests:
            self.finish_all(request.sequences)
        return list(requests)

    def drop(self, ahead: Plan) -> None:
        """Give up a step that was submitted behind a failed one. Those that are in both are
        finished; the others go on from where they were."""
        for sequence in ahead.sequences:
            sequence.step_over()
            if sequence.is_ending and not sequence.num_scheduled:
                self._release(sequence)
            elif sequence.state is SequenceState.RUNNING and sequence.num_pending == 1:
                self.memory.give_back(sequence)

    def finish_all(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            self.finish(sequence)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence at any moment; idempotent. Memory that a step in flight refers to is
        released when that step is committed."""
        if sequence.state is SequenceState.FINISHED:
            return
        if sequence.state is SequenceState.RUNNING:
            if sequence.num_scheduled:
                sequence.is_ending = True
            else:
                self._release(sequence)
            return
        if sequence.state is SequenceState.WAITING:
            self.queues.leave(sequence)
        elif sequence.state is SequenceState.RESTORING:
            self.num_restoring -= 1
        else:
            self.queues.num_held -= 1
        self._end(sequence)

    def check_integrity(self) -> None:
        """Raise NativeError or AssertionError unless every block and row is accounted for."""
        self.memory.check_integrity(self.queues.running)

    def _release(self, sequence: Sequence) -> None:
        self.queues.running.remove(sequence)
        self.memory.pin(sequence)
        self.memory.release(sequence)
        sequence.is_ending = False
        self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.FINISHED
        self.queues.close(sequence)
        if self._speculation is not None:
            self._speculation.end(sequence)
        if sequence.request.adapter is not None:
            sequence.request.adapter.release()

    def _release_held(self, request: ActiveRequest) -> None:
        for sequence in request.sequences:
            if sequence.state is SequenceState.HELD:
                self.queues.num_held -= 1
                self.queues.wait(sequence)


def _states_by_sequence(plan: Plan, rows: FloatArray | None) -> dict[Sequence, FloatArray]:
    assert rows is not None
    firsts = plan.step.view("first_rows").tolist()
    return {
        sequence: rows[first : first + sequence.num_scheduled]
        for sequence, first in zip(plan.sequences, firsts, strict=True)
        if sequence.request.wants_states
    }
