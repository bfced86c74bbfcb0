"""Sequences from arrival to release, around the steps that compute them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from lmi_core.engine.commit import Commit, Output, PromptChunk
from lmi_core.engine.deadlines import Deadlines
from lmi_core.engine.fair_shares import FairShares
from lmi_core.engine.kv_memory import KvMemory
from lmi_core.engine.model_drafts import DraftChain
from lmi_core.engine.outputs import FinishReason
from lmi_core.engine.policy import Plan, Policy, Queues, preempt
from lmi_core.engine.searches import SearchMoves
from lmi_core.engine.sequence import ActiveRequest, Sequence, SequenceState
from lmi_core.engine.speculation import Speculation
from lmi_core.models.pooling_head import LogitRows
from lmi_core.structured.chained_mask import ChainedMask
from lmi_core.structured.mask_threads import MissingMask
from lmi_core.structured.matcher import Matcher
from lmi_core.weights.formats import FloatArray

if TYPE_CHECKING:
    from lmi_core._native import Step


class Scheduler:
    """A state machine without I/O: ``plan``, ``fill``, then ``commit`` or ``fail``, in turn."""

    def __init__(
        self,
        queues: Queues,
        memory: KvMemory,
        policy: Policy,
        speculation: Speculation | None = None,
        shares: FairShares | None = None,
    ) -> None:
        """``shares``: the policy's, to be told what is served."""
        self.queues = queues
        self.memory = memory
        self._block_size = memory.block_size
        self._policy = policy
        self._speculation = speculation
        self._shares = FairShares() if shares is None else shares
        self._searches = SearchMoves(queues, memory, self._shares, self._preempt)
        self._deadlines = Deadlines()
        self.num_preemptions = 0
        self.num_restoring = 0
        """Sequences that are RESTORING."""
        self._masked: list[MissingMask] = []
        """Of the step being submitted."""

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

    def add(self, request: ActiveRequest, *, is_restoring: bool = False) -> None:
        """Queue a request's open choices; all but the first are held until the prompt is computed,
        unless there is output already, with which each is computed for itself. The first is held
        until ``restored``, if its prefix ``is_restoring``."""
        left = [s for s in request.sequences if s.state is not SequenceState.FINISHED]
        has_output = any(sequence.num_generated for sequence in request.sequences)
        self._shares.open(left)
        self._deadlines.add(request)
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

    def plan(self, now_s: float) -> Plan:
        """Decide the next step; empty when nothing can run. ``now_s``: for those that may wait only
        so long, as ``arrival_s`` counts."""
        expired = self._deadlines.take_due(now_s)
        for request in expired:
            self.finish_all(request.sequences)
        plan = self._policy.plan()
        plan.expired = expired
        plan.wants_states = any(
            sequence.request.search is not None and sequence.request.wants_states
            for sequence in plan.sequences
        )
        self.num_preemptions += plan.num_preempted
        if self._speculation is not None:
            self._speculation.add_drafts(plan, plan.sequences, self.num_running)
        return plan

    def plan_ahead(self, plan: Plan, now_s: float) -> Plan | None:
        """The step behind ``plan``, which is in flight: the same sequences decode on, but for those
        that end with it or that speculate, which are in every second step then: they need the
        results of theirs. None where results or another choice of sequences may matter."""
        memory, running = self.memory, self.queues.running
        if self.queues.waiting and (self._policy.can_admit or self._deadlines.is_due(now_s)):
            return None
        known = [sequence for sequence in running if not sequence.num_scheduled]
        if len(plan.sequences) + len(known) != len(running):
            return None
        if any(s.num_pending != 1 or s.request.search is not None for s in known):
            return None
        following = [sequence for sequence in plan.sequences if not sequence.drafts]
        if not all(sequence.can_run_ahead for sequence in following):
            return None
        if self._speculation is not None:
            following = self._speculation.without_waiting(following)
        following = [
            sequence
            for sequence in following
            if not sequence.is_ending and len(sequence.token_ids) + 1 < sequence.max_len
        ]
        if not following:
            return None
        for sequence in following + known:
            end = len(sequence.token_ids) + bool(sequence.num_scheduled)
            is_full = end > len(sequence.block_ids) * memory.block_size
            if is_full and not memory.extend(sequence):
                return None  # a block that was taken is there for the next plan
        ahead = Plan(following + known, num_following=len(following))
        ahead.num_tokens = len(ahead.sequences)
        self._policy.pass_step()
        return ahead

    def fill_ahead(self, ahead: Plan, step: Step) -> list[int]:
        """Write the plan into a step buffer. Its token ids are what the logit rows returned, of the
        step in flight, will have sampled; -1: the ids are known."""
        step.clear()
        self._masked = []
        following = ahead.sequences[: ahead.num_following]
        known = ahead.sequences[ahead.num_following :]
        for sequence in following:
            start, row = len(sequence.token_ids), sequence.row
            slot = sequence.request.adapter_slot
            sequence.ahead_row = step.add([0], start, row, row, "last", slot)
        for sequence in known:
            sequence.num_scheduled = 1
        if self._speculation is not None:
            self._speculation.add_drafts(ahead, known, self.num_running)
        for sequence in known:
            self._fill_one(sequence, step, ahead.chain)
        if ahead.chain is not None:
            ahead.chain.lead_to(step)
        for sequence in following:
            sequence.num_ahead = 1
        rows = [sequence.logit_row for sequence in following]
        return rows + [-1] * (step.num_tokens - len(rows))

    def cancel_ahead(self, ahead: Plan) -> None:
        """It couldn't be submitted."""
        for sequence in ahead.sequences[: ahead.num_following]:
            sequence.num_ahead = 0
        for sequence in ahead.sequences[ahead.num_following :]:
            sequence.step_over()

    def fill(self, plan: Plan, step: Step) -> None:
        """Write the plan into a step buffer; masks are missing, see ``missing_masks``."""
        step.clear()
        self._masked = []
        for source, target in plan.copies:
            step.add_copy(source, target)
        for sequence in plan.sequences:
            self._fill_one(sequence, step, plan.chain)
        if plan.chain is not None:
            plan.chain.lead_to(step)

    def _fill_one(self, sequence: Sequence, step: Step, chain: DraftChain | None) -> None:
        start = sequence.num_computed
        end = start + sequence.num_scheduled
        row, slot = sequence.row, sequence.request.adapter_slot
        token_ids = sequence.token_ids
        if sequence.drafts:
            tokens = [token_ids[-1], *sequence.drafts]
            sequence.logit_row = step.add(tokens, start, row, row, "drafts", slot)
            if sequence.matcher is not None:
                self._add_masks(sequence.matcher, sequence, sequence.logit_row, step, chain)
            return
        if sequence.request.is_scoring_prompt and sequence.is_scoring_prompt:
            logit_row = step.add(token_ids[start:end], start, row, row, "all", slot)
            if end < sequence.num_prompt:
                step.set_target(logit_row + end - start - 1, token_ids[end])
            sequence.logit_row = logit_row
        else:
            wanted: LogitRows = "last" if end == len(token_ids) else "none"
            if sequence.row_sum is not None:
                wanted = sequence.row_sum.wanted(start, wanted)
            sequence.logit_row = step.add(
                token_ids[start:end], start, row, row, wanted, slot, sequence.num_first
            )
        if sequence.matcher is not None and end == len(token_ids):
            self._add_masks(sequence.matcher, sequence, step.num_logit_rows - 1, step)

    def _add_masks(
        self,
        matcher: Matcher,
        sequence: Sequence,
        first_row: int,
        step: Step,
        chain: DraftChain | None = None,
    ) -> None:
        rows = range(first_row, step.num_logit_rows)
        masks = [step.add_mask(row) for row in rows]
        ready = partial(_masks_ready, sequence, step, rows)
        drafted = None if chain is None else chain.masked.get(sequence)
        if drafted is None:
            missing = MissingMask(matcher, masks, ready, sequence.drafts)
        else:
            missing = ChainedMask(matcher, masks, ready, sequence.drafts, drafted)
        self._masked.append(missing)

    def missing_masks(self) -> list[MissingMask]:
        """The masks that the step which was filled last waits for. A grammar that fails leaves its
        own row without a token."""
        masked, self._masked = self._masked, []
        return masked

    def commit(self, plan: Plan, step: Step, rows: FloatArray | None = None) -> Commit:
        """Take over a completed step: append tokens, publish blocks, release what ended. ``rows``:
        what a model that pools has given for logit rows; the hidden states of token rows, if
        ``plan.wants_states``."""
        commit = Commit()
        sampled = step.sampled()
        if self._speculation is not None:
            self._speculation.settle(plan, step)
        states = _states_by_sequence(plan, step, rows) if plan.wants_states else {}
        for sequence in plan.sequences:
            try:
                if sequence.request.search is not None:
                    self._commit_search(sequence, step, states.get(sequence), commit)
                elif sequence.row_sum is None:
                    self._commit_one(sequence, sampled, commit)
                else:
                    assert rows is not None
                    self._commit_pooled(sequence, rows, commit)
            except Exception as error:  # one request's fault must not end the others
                commit.failures.append((sequence, error))
                self.finish_all(sequence.request.sequences)
        return commit

    def keep_states(self, commit: Commit, states: FloatArray) -> None:
        """The hidden states of a committed step's logit rows, for heads that draft."""
        if self._speculation is not None:
            self._speculation.keep_states(commit, states)

    def _commit_pooled(self, sequence: Sequence, rows: FloatArray, commit: Commit) -> None:
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
            commit.pooled.append(sequence)

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

    def _commit_one(self, sequence: Sequence, sampled: list[int], commit: Commit) -> None:
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
            num_scored = self._commit_scores(sequence, logit_row, start, end - start, commit)
            if request.is_scoring_prompt:
                return
            logit_row += num_scored
        if end == sequence.num_prompt:
            self._release_held(request)
        commit.outputs.append(self._append(sequence, sampled[logit_row], logit_row))
        if drafts:
            self._commit_drafts(sequence, drafts, sampled, commit)

    def _commit_search(
        self, sequence: Sequence, step: Step, states: FloatArray | None, commit: Commit
    ) -> None:
        ranked = None if sequence.logit_row < 0 else step.top(sequence.logit_row)
        self._step_over(sequence)
        if sequence.is_ending:
            self._release(sequence)
        elif self._searches.go_on(sequence, ranked, states, commit):
            self.finish_all(sequence.request.sequences)

    def _preempt(self, sequence: Sequence) -> None:
        preempt(self.queues, self.memory, sequence)
        self.num_preemptions += 1

    def _publish(self, sequence: Sequence) -> None:
        num_new = sequence.num_computed - sequence.num_published * self._block_size
        if num_new >= self._block_size:
            self.memory.publish(sequence)

    def _commit_drafts(
        self, sequence: Sequence, drafts: list[int], sampled: list[int], commit: Commit
    ) -> None:
        """Go on from row to row as long as what one sampled is what the next one computed."""
        num_accepted = 0
        for draft in drafts:
            output = commit.outputs[-1]
            if output.token_id != draft or output.finish_reason is not None:
                break
            num_accepted += 1
            sequence.num_computed += 1
            self._publish(sequence)
            row = output.logit_row + 1
            commit.outputs.append(self._append(sequence, sampled[row], row))
        if sequence.state is SequenceState.RUNNING:
            self.memory.give_back(sequence)
        if self._speculation is not None:
            self._speculation.count(sequence, len(drafts), num_accepted)

    def _commit_scores(
        self, sequence: Sequence, logit_row: int, start: int, num_tokens: int, commit: Commit
    ) -> int:
        """Note the scored tokens of the prompt, and how many there are."""
        is_complete = sequence.num_computed == len(sequence.token_ids)
        num_scored = num_tokens - is_complete
        commit.prompt_chunks.append(
            PromptChunk(sequence.request, logit_row, start + 1, num_scored, is_complete)
        )
        sequence.request.is_scoring_prompt = not is_complete
        return num_scored

    def _append(self, sequence: Sequence, token_id: int, logit_row: int) -> Output:
        token_ids = sequence.token_ids
        reason: FinishReason | None = None
        if token_id < 0:
            reason = FinishReason.ABORT
        else:
            token_ids.append(token_id)
            self._shares.note_generated(sequence)
            if token_id in sequence.end_ids:
                is_stop_id = token_id in sequence.request.request.params.stop_token_ids
                reason = FinishReason.STOP if is_stop_id else FinishReason.EOS
            elif sequence.matcher is not None and self._ends_grammar(sequence, token_id):
                reason = FinishReason.EOS
            elif len(token_ids) >= sequence.max_len:
                reason = FinishReason.LENGTH
        if sequence.error is not None:
            reason = FinishReason.ABORT
        num_generated = len(token_ids) - sequence.num_prompt
        if reason is not None:
            self.finish(sequence)
        elif sequence.needs_observe:
            self.memory.observe(sequence, token_id)
        return Output(sequence, token_id, logit_row, num_generated, reason)

    def _ends_grammar(self, sequence: Sequence, token_id: int) -> bool:
        """Go on in the grammar by a token; whether the text ends here, without an id that says so:
        there is no such id, it may not come yet, or there is no room for it."""
        assert sequence.matcher is not None
        try:
            sequence.matcher.accept(token_id)
        except Exception as error:
            sequence.error = error
            return True
        if not sequence.matcher.is_complete:
            if sequence.matcher.is_spent:
                sequence.matcher = None
            return False
        length = len(sequence.token_ids)
        min_length = sequence.num_prompt + sequence.request.request.params.min_new_tokens
        return not sequence.has_eos or length < min_length or length >= sequence.max_len

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
            elif sequence.state is SequenceState.RUNNING:
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
        self._shares.close(sequence)
        if self._speculation is not None:
            self._speculation.end(sequence)
        if sequence.request.adapter is not None:
            sequence.request.adapter.release()

    def _release_held(self, request: ActiveRequest) -> None:
        for sequence in request.sequences:
            if sequence.state is SequenceState.HELD:
                self.queues.num_held -= 1
                self.queues.wait(sequence)


def _states_by_sequence(
    plan: Plan, step: Step, rows: FloatArray | None
) -> dict[Sequence, FloatArray]:
    assert rows is not None
    firsts = step.view("first_rows").tolist()
    return {
        sequence: rows[first : first + sequence.num_scheduled]
        for sequence, first in zip(plan.sequences, firsts, strict=True)
        if sequence.request.wants_states
    }


def _masks_ready(
    sequence: Sequence, step: Step, logit_rows: range, error: Exception | None
) -> None:
    sequence.error = error
    for row in logit_rows:
        step.set_mask_ready(row)
