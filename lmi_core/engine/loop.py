"""The engine's loop: one step after the other, and sleep when there is nothing to do."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, cast

from lmi_core._native import StepCosts
from lmi_core.engine.delivery import Delivery
from lmi_core.engine.intake import waited_too_long
from lmi_core.engine.plan import Plan
from lmi_core.engine.scheduler import Scheduler
from lmi_core.engine.sequence import ActiveRequest, Sequence
from lmi_core.engine.stats import EngineObserver, EngineTotals, StepRecord, observe
from lmi_core.engine.step_filling import fill
from lmi_core.errors import EngineError, UserError
from lmi_core.runners.runner import (
    AheadRunner,
    DraftingRunner,
    HeadsRunner,
    PoolingRunner,
    Runner,
    StatesRunner,
)
from lmi_core.structured.mask_threads import MaskThreads, MissingMask

if TYPE_CHECKING:
    from lmi_core._native import Step

_log = logging.getLogger(__name__)

MAX_FAILURES_IN_A_ROW = 2
MAX_AHEAD_S = 0.04
"""Behind longer steps none is submitted ahead: what the loop takes between two is little beside
them."""
LEAD_S, LEAD_PART = 0.002, 0.3
"""So long before a step's likely end, and at first such a part of it, the next one is submitted.
Who comes until then needn't wait for one more step."""
LATE_SHARE, LEAD_STRIDE = 0.01, 0.1
"""Of steps, how many may come after the end of the one before; how much earlier the next are
submitted when one did."""


def next_lead(lead: float, *, is_late: bool) -> float:
    """How early to submit, as a part of a step, learned, since on some machines the times of steps
    spread by a tenth: a quantile followed by small steps, up for each that was late, which is where
    the step before had ended, and down for each that wasn't."""
    change = LEAD_STRIDE * ((1.0 if is_late else 0.0) - LATE_SHARE)
    return min(max(lead + change, 0.0), 1.0)


class StepLoop:
    """Drives scheduler and runner until told to stop; ``run`` is its only task."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        delivery: Delivery,
        totals: EngineTotals,
        observer: EngineObserver,
        *,
        overlap: bool,
        check_integrity: bool = False,
        costs: StepCosts | None = None,
    ) -> None:
        """``check_integrity``: account for every block after every step (tests); ``costs``: told of
        every step."""
        self._scheduler = scheduler
        self._runner = runner
        self._delivery = delivery
        self._totals = totals
        self._observer = observer
        self._overlap = overlap
        self._check_integrity = check_integrity
        self._costs = StepCosts() if costs is None else costs
        self._masks = MaskThreads()
        self._next_buffer = 0
        self._num_failures_in_a_row = 0
        self._is_stopping = False
        self._wake = asyncio.Event()
        self._is_held = False
        self._in_flight: deque[Plan] = deque()
        self._lead = LEAD_PART
        self._completed_s = 0.0
        """When the last step completed."""
        self.is_healthy = True

    def wake(self) -> None:
        """There is work, or a reason to stop."""
        self._wake.set()

    def hold(self, *, is_held: bool) -> None:
        """Submit no steps, or go on, unless the loop is stopping."""
        self._is_held = is_held and not self._is_stopping
        self._wake.set()

    def stop(self) -> None:
        """Let ``run`` return once there is no more work."""
        self._is_stopping = True
        self._is_held = False
        self._wake.set()

    async def run(self) -> None:
        """Work until stopped. Whatever goes wrong here fails the open requests, never silently."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._runner.completion_fd, self._on_completion)
        try:
            await (self._run_overlapped() if self._overlap else self._run_plain())
        except Exception as error:
            _log.exception("the engine's loop failed")
            self._die(error)
        finally:
            self.detach()

    def detach(self) -> None:
        """Stop watching the runner, before it is closed. Idempotent."""
        asyncio.get_running_loop().remove_reader(self._runner.completion_fd)
        self._masks.close()

    async def _run_plain(self) -> None:
        while await self._has_work():
            submitted = self._submit_next()
            if submitted is None:
                continue
            await submitted.done
            committed = self._commit(submitted)
            if committed is not None:
                await self._deliver(committed)

    async def _run_overlapped(self) -> None:
        """As the plain loop, but events of a step are handed out while the next one runs, and where
        these don't matter, that one is submitted shortly before the last one's tokens are known."""
        submitted: Plan | None = None
        committed: Plan | None = None
        while submitted is not None or committed is not None or await self._has_work():
            if submitted is None and not self._is_held:
                submitted = self._submit_next()
                if submitted and committed:
                    gap_s = submitted.submitted_s - committed.step.finished_ns * 1e-9
                    self._costs.note_gap(gap_s, ahead=False)
            following = None
            is_due = submitted is not None and self._left_s(submitted) <= 0.0
            if submitted is not None and is_due:
                following = self._submit_ahead(submitted)
            if committed is not None:
                await self._deliver(committed)
                committed = None
            if submitted is not None:
                if not is_due and await self._is_nearly_done(submitted):
                    following = self._submit_ahead(submitted)
                await submitted.done
                committed = self._commit(submitted)
            if submitted is not None and following is not None:
                if wanted := [each.mask for each in following.held if each.is_wanted()]:
                    self._masks.fill(wanted)
                ended_s = submitted.step.finished_ns * 1e-9
                is_late = following.submitted_s > ended_s > 0.0
                self._lead = next_lead(self._lead, is_late=is_late)
            if following is not None and committed is None:
                await following.done  # it read what the failed step should have written
                self._give_up_masks(following)
                self._scheduler.drop(following)
                following = None
            submitted = following

    async def _has_work(self) -> bool:
        """Wait until something can run, and may; False when stopped."""
        while self._is_held or not self._scheduler.has_work:
            if self._is_stopping and not self._scheduler.num_restoring:
                return False
            self._wake.clear()
            await self._wake.wait()
        return True

    def _submit_next(self) -> Plan | None:
        """Plan a step and hand it to the worker; None when nothing can run, or it failed."""
        now_s = time.monotonic()
        plan = self._scheduler.plan(now_s)
        self._fail_expired(plan.expired, now_s)
        self._fail_requests(plan.failures, "planning a step for the request failed")
        if not plan.sequences:
            if self._scheduler.has_work and not plan.failures:
                raise EngineError("sequences wait, but none can run")
            return None
        runner = self._runner
        submit = runner.submit
        if plan.wants_states:
            submit = cast(StatesRunner, runner).submit_with_states
        error = self._submit(plan, fill, submit)
        if error is not None:
            self._fail(plan, str(error))
        return plan if error is None else None

    def _submit_ahead(self, submitted: Plan) -> Plan | None:
        """Submit what follows a step in flight, if it can be known and is worth it."""
        if self._is_held:
            return None
        ahead = self._scheduler.ahead
        plan = ahead.plan(submitted, time.monotonic())
        if plan is None:
            return None
        self._fail_requests(plan.failures, "planning a step for the request failed")
        runner = cast(AheadRunner, self._runner)
        submit = lambda step: runner.submit_ahead(step, plan.logit_rows)  # noqa: E731
        if self._submit(plan, ahead.fill, submit) is None:
            return plan
        self._next_buffer = (self._next_buffer - 1) % len(runner.steps)
        ahead.cancel(plan)
        return None

    def _submit(
        self,
        plan: Plan,
        fill: Callable[[Plan, Step], list[MissingMask]],
        submit: Callable[[Step], None],
    ) -> Exception | None:
        """Write the plan into the next buffer and hand that over, behind the plan's drafts; returns
        why that failed."""
        step = self._next_step()
        plan.done = asyncio.get_running_loop().create_future()
        masks: list[MissingMask] = []
        try:
            masks = fill(plan, step)
            plan.submitted_s = time.monotonic()
            if plan.chain is not None:
                cast(DraftingRunner, self._runner).drafter.submit(plan.chain.steps)
            submit(step)
        except Exception as error:
            _log.exception("a step couldn't be submitted")
            self._masks.give_up(masks)  # the chain may have been submitted, and waits for them
            return error
        self._in_flight.append(plan)
        plan.masks = masks
        if masks or plan.held:
            self._masks.fill(masks, held=[each.mask for each in plan.held])
        return None

    def _left_s(self, submitted: Plan) -> float:
        """Until it is time for the step behind; infinite: there is to be none."""
        took_s = self._costs.seconds(submitted.num_tokens, ahead=True)
        if took_s > MAX_AHEAD_S or not self._runner.info.runs_ahead:
            return math.inf
        begun_s = max(submitted.submitted_s, self._completed_s)
        return begun_s + (1.0 - self._lead) * took_s - LEAD_S - time.monotonic()

    async def _is_nearly_done(self, submitted: Plan) -> bool:
        """Wait until it is time for the step behind; False if there is none to come."""
        left_s = self._left_s(submitted)
        if 0.0 < left_s < math.inf:
            await asyncio.wait([submitted.done], timeout=left_s)
        if left_s == math.inf:
            return False
        is_late = submitted.done.done()
        if is_late:
            self._lead = next_lead(self._lead, is_late=True)
        return not is_late

    def _next_step(self) -> Step:
        steps = self._runner.steps
        step = steps[self._next_buffer]
        self._next_buffer = (self._next_buffer + 1) % len(steps)
        return step

    def _on_completion(self) -> None:
        for _ in range(os.eventfd_read(self._runner.completion_fd)):
            done = self._in_flight.popleft().done
            if not done.done():
                done.set_result(None)

    def _commit(self, plan: Plan) -> Plan | None:
        """Take over a completed step, and return it; None if it failed."""
        step, submitted_s = plan.step, plan.submitted_s
        completed_s = plan.completed_s = time.monotonic()
        # A step that was submitted ahead began when the one before it had ended.
        seconds = completed_s - max(submitted_s, self._completed_s)
        if submitted_s < self._completed_s:
            gap_s = seconds - plan.chain_s - step.native_ns * 1e-9
            self._costs.note_gap(gap_s, ahead=True)
        self._count(plan, seconds)
        self._completed_s = completed_s
        if step.error:
            _log.error("a step failed: %s", step.error)
            self._fail(plan, step.error, is_final=step.is_final)
            return None
        self._num_failures_in_a_row = 0
        rows = None
        if self._runner.info.pooling is not None:
            rows = cast(PoolingRunner, self._runner).pooled_rows(step)
        elif plan.wants_states:
            rows = cast(StatesRunner, self._runner).states(step)
        self._scheduler.commit(plan, rows)
        if self._runner.info.has_draft_heads and not self._in_flight and not plan.wants_states:
            self._scheduler.keep_states(plan, cast(HeadsRunner, self._runner).head_rows(step))
        self._fail_requests(plan.failures, "taking over the request's step failed")
        if self._check_integrity:
            self._scheduler.check_integrity()
        return plan

    async def _deliver(self, plan: Plan) -> None:
        """What the next step needn't wait for."""
        await self._delivery.deliver(plan)
        self._scheduler.memory.keep_published()

    def _count(self, plan: Plan, seconds: float) -> None:
        totals = self._totals
        native_seconds = plan.step.native_ns * 1e-9
        if native_seconds > 0:
            self._costs.note(plan.num_tokens, native_seconds)
        totals.num_steps += 1
        totals.num_weight_bytes += self._runner.info.weight_bytes
        totals.step_seconds += seconds
        totals.native_seconds += native_seconds + plan.chain_s
        record = StepRecord(plan.num_tokens, len(plan.sequences), seconds, native_seconds)
        observe(self._observer.on_step, record)

    def _fail(self, plan: Plan, cause: str, *, is_final: bool = False) -> None:
        """A failed step publishes nothing and takes only its own requests with it; ``is_final``: no
        later one can succeed."""
        self._give_up_masks(plan)
        self._totals.num_failed_steps += 1
        self._num_failures_in_a_row += 1
        if is_final or self._num_failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            self.is_healthy = False
        for request in self._scheduler.fail(plan):
            self._delivery.fail(request, EngineError(f"the step that served the request: {cause}"))
        self._scheduler.check_integrity()

    def _give_up_masks(self, plan: Plan) -> None:
        """Of a step that is over: one that failed may not have waited for them, and its buffer is
        the next one's."""
        self._masks.give_up([*plan.masks, *(each.mask for each in plan.held)])

    def _fail_expired(self, requests: list[ActiveRequest], now_s: float) -> None:
        for request in requests:
            error = waited_too_long(now_s - request.arrival_s, request.request.max_queue_s)
            self._delivery.fail(request, error)

    def _fail_requests(self, failures: Iterable[tuple[Sequence, Exception]], what: str) -> None:
        """End the requests that our own code failed for, outside of the step itself."""
        for sequence, error in failures:
            request = sequence.request
            _log.error("request %s: %s", request.request_id, what, exc_info=error)
            is_theirs = isinstance(error, UserError)
            self._delivery.fail(request, error if is_theirs else EngineError(f"{what}: {error}"))

    def _die(self, error: Exception) -> None:
        """End every request; queues and blocks may be inconsistent and aren't touched any more."""
        self.is_healthy = False
        self._delivery.fail_all(EngineError(f"the engine's loop failed: {error}"))
