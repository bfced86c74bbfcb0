"""Sequences from arrival to release, around the steps that compute them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from lmi_core.engine.active_request import ActiveRequest
from lmi_core.engine.kv_memory import KvMemory
from lmi_core.engine.outputs import FinishReason
from lmi_core.engine.policy import Plan, Policy, Queues
from lmi_core.engine.sequence import Sequence, SequenceState
from lmi_core.structured.mask_threads import MissingMask
from lmi_core.structured.matcher import Mask

if TYPE_CHECKING:
    from lmi_core._native import Step


class Output(NamedTuple):
    """A token that a step sampled; ``token_id`` -1: no token was possible."""

    sequence: Sequence
    token_id: int
    logit_row: int
    num_generated: int
    finish_reason: FinishReason | None


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

    outputs: list[Output] = field(default_factory=list)
    prompt_chunks: list[PromptChunk] = field(default_factory=list)
    failures: list[tuple[Sequence, Exception]] = field(default_factory=list)
    """Sequences that the commit itself failed for; all choices of their requests are finished."""


class Scheduler:
    """A state machine without I/O: ``plan``, ``fill``, then ``commit`` or ``fail``, in turn."""

    def __init__(self, queues: Queues, memory: KvMemory, policy: Policy) -> None:
        self.queues = queues
        self.memory = memory
        self._block_size = memory.block_size
        self._policy = policy
        self.num_preemptions = 0
        self._num_held = 0
        self._masked: list[tuple[Sequence, int, Mask]] = []
        """What the grammars of the step being submitted must still fill: logit rows, masks."""

    @property
    def num_running(self) -> int:
        return len(self.queues.running)

    @property
    def num_waiting(self) -> int:
        return len(self.queues.waiting) + self._num_held

    @property
    def num_running_requests(self) -> int:
        return len({sequence.request for sequence in self.queues.running})

    @property
    def has_work(self) -> bool:
        return bool(self.queues.running or self.queues.waiting)

    def add(self, request: ActiveRequest) -> None:
        """Queue a request's choices; all but the first are held until the prompt is computed."""
        if request.adapter is not None:
            for _ in request.sequences:
                request.adapter.acquire()
        first, *others = request.sequences
        self.queues.wait(first)
        self._num_held += len(others)
        for sequence in others:
            sequence.state = SequenceState.HELD

    def plan(self) -> Plan:
        """Decide the next step; empty when nothing can run."""
        plan = self._policy.plan()
        self.num_preemptions += plan.num_preempted
        return plan

    def plan_ahead(self, plan: Plan) -> Plan | None:
        """The step behind ``plan``, which is in flight: the same sequences decode on, but for those
        that end with it. None where results or another choice of sequences may matter."""
        memory, running = self.memory, self.queues.running
        if len(plan.sequences) != len(running) or (self.queues.waiting and memory.num_free_rows):
            return None
        if not all(sequence.can_run_ahead for sequence in plan.sequences):
            return None
        ahead = Plan()
        for sequence in plan.sequences:
            length = len(sequence.token_ids)
            if sequence.is_ending or length + 1 >= sequence.max_len:
                continue
            is_full = length == len(sequence.block_ids) * memory.block_size
            if is_full and not memory.extend(sequence):
                return None  # a block that was taken is there for the next plan
            ahead.sequences.append(sequence)
        ahead.num_tokens = len(ahead.sequences)
        if not ahead.sequences:
            return None
        self._policy.pass_step()
        return ahead

    def fill_ahead(self, ahead: Plan, step: Step) -> list[int]:
        """Write the plan into a step buffer. Its token ids are what the logit rows returned, of the
        step in flight, will have sampled."""
        step.clear()
        for sequence in ahead.sequences:
            start, row = len(sequence.token_ids), sequence.row
            slot = sequence.request.adapter_slot
            sequence.ahead_row = step.add([0], start, row, row, "last", slot)
        for sequence in ahead.sequences:
            sequence.num_ahead = 1
        return [sequence.logit_row for sequence in ahead.sequences]

    def cancel_ahead(self, ahead: Plan) -> None:
        """It couldn't be submitted."""
        for sequence in ahead.sequences:
            sequence.num_ahead = 0

    def fill(self, plan: Plan, step: Step) -> None:
        """Write the plan into a step buffer; masks are missing, see ``missing_masks``."""
        step.clear()
        self._masked = []
        for source, target in plan.copies:
            step.add_copy(source, target)
        for sequence in plan.sequences:
            self._fill_one(sequence, step)

    def _fill_one(self, sequence: Sequence, step: Step) -> None:
        start = sequence.num_computed
        end = start + sequence.num_scheduled
        row, slot = sequence.row, sequence.request.adapter_slot
        token_ids = sequence.token_ids
        if sequence.request.is_scoring_prompt and sequence.is_scoring_prompt:
            logit_row = step.add(token_ids[start:end], start, row, row, "all", slot)
            if end < sequence.num_prompt:
                step.set_target(logit_row + end - start - 1, token_ids[end])
            sequence.logit_row = logit_row
        elif end == len(token_ids):
            sequence.logit_row = step.add(token_ids[start:end], start, row, row, "last", slot)
        else:
            sequence.logit_row = step.add(token_ids[start:end], start, row, row, "none", slot)
        if sequence.matcher is not None and end == len(token_ids):
            sampled_row = step.num_logit_rows - 1
            self._masked.append((sequence, sampled_row, step.add_mask(sampled_row)))

    def missing_masks(self, step: Step) -> list[MissingMask]:
        """The masks that the step which ``fill`` wrote waits for. A grammar that fails leaves its
        own row without a token."""
        masked, self._masked = self._masked, []
        return [
            MissingMask(sequence.matcher, mask, partial(_mask_ready, sequence, step, logit_row))
            for sequence, logit_row, mask in masked
            if sequence.matcher is not None
        ]

    def commit(self, plan: Plan, step: Step) -> Commit:
        """Take over a completed step: append tokens, publish blocks, release what ended."""
        commit = Commit()
        sampled = step.sampled()
        for sequence in plan.sequences:
            try:
                self._commit_one(sequence, sampled, commit)
            except Exception as error:  # one request's fault must not end the others
                commit.failures.append((sequence, error))
                self.finish_all(sequence.request.sequences)
        return commit

    def _commit_one(self, sequence: Sequence, sampled: list[int], commit: Commit) -> None:
        num_tokens, logit_row = sequence.num_scheduled, sequence.logit_row
        sequence.step_over()
        start = sequence.num_computed
        sequence.num_computed = end = start + num_tokens
        # A sequence that ended may have gone on by a token that nobody knows.
        if end - sequence.num_published * self._block_size >= self._block_size and end <= len(
            sequence.token_ids
        ):
            self.memory.publish(sequence)
        if sequence.is_ending:
            if not sequence.num_scheduled:
                self._release(sequence)
            return
        if logit_row < 0:
            return
        request = sequence.request
        if request.is_scoring_prompt and sequence.is_scoring_prompt:
            num_scored = self._commit_scores(sequence, logit_row, start, num_tokens, commit)
            if request.is_scoring_prompt:
                return
            logit_row += num_scored
        if end == sequence.num_prompt:
            self._release_held(request)
        commit.outputs.append(self._append(sequence, sampled[logit_row], logit_row))

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
            self.queues.waiting.remove(sequence)
        else:
            self._num_held -= 1
        self._end(sequence)

    def check_integrity(self) -> None:
        """Raise NativeError or AssertionError unless every block and row is accounted for."""
        self.memory.check_integrity(self.queues.running)

    def _release(self, sequence: Sequence) -> None:
        self.queues.running.remove(sequence)
        self.memory.release(sequence)
        sequence.is_ending = False
        self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.FINISHED
        if sequence.request.adapter is not None:
            sequence.request.adapter.release()

    def _release_held(self, request: ActiveRequest) -> None:
        for sequence in request.sequences:
            if sequence.state is SequenceState.HELD:
                self._num_held -= 1
                self.queues.wait(sequence)


def _mask_ready(sequence: Sequence, step: Step, logit_row: int, error: Exception | None) -> None:
    sequence.error = error
    step.set_mask_ready(logit_row)
