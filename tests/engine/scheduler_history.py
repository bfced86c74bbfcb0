"""A scheduler over the fake model, driven step by step and checked after every step."""

from __future__ import annotations

import itertools
from pathlib import Path

from lmi_core.engine.kv_memory import KvMemory
from lmi_core.engine.lora_slots import LoraSlots
from lmi_core.engine.paged_policy import PagedPolicy
from lmi_core.engine.plan import Plan
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.engine.scheduler import Scheduler
from lmi_core.engine.sequence import ActiveRequest, Sequence, SequenceState
from lmi_core.engine.step_filling import fill
from lmi_core.engine.stream import EventStream
from tests.engine.fake_runner import FakeModel
from tests.engine.harness import byte_tokenizer
from tests.engine.oracle import expected_tokens

TOKENIZER = byte_tokenizer()


class History:
    """A scheduler over the fake model, driven step by step."""

    def __init__(
        self,
        *,
        enable_prefix_caching: bool = True,
        guaranteed_no_evict: bool = False,
        runs_ahead: bool = False,
        **capacities: int | None,
    ) -> None:
        """``runs_ahead``: steps are planned while the one before them is in flight, where they can
        be."""
        self.model = FakeModel(has_adapters=True, **capacities)  # type: ignore[arg-type]
        self._runs_ahead = runs_ahead
        self._steps = itertools.cycle(self.model.steps)
        self._in_flight: Plan | None = None
        self._sampled: list[int] = []
        self.num_ahead = 0
        runner: object = self.model
        self.memory = KvMemory(
            runner,  # type: ignore[arg-type]
            enable_prefix_caching=enable_prefix_caching,
            guaranteed_no_evict=guaranteed_no_evict,
        )
        policy = PagedPolicy(self.model.info, self.memory, guaranteed_no_evict=guaranteed_no_evict)
        self.scheduler = Scheduler(self.memory, policy)
        self.adapters = LoraSlots(runner)  # type: ignore[arg-type]
        self.num_leaving = 0
        self.requests: list[ActiveRequest] = []
        self.aborted: set[ActiveRequest] = set()
        self.failed: set[ActiveRequest] = set()
        self.restoring: list[ActiveRequest] = []
        self.expired: set[ActiveRequest] = set()
        self.now_s = 0.0
        """A step takes a second."""
        self._numbers = itertools.count()

    def arrive(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        salt: str = "",
        adapter: str = "",
        tenant: str = "",
        is_restoring: bool = False,
        max_queue_s: float | None = None,
    ) -> ActiveRequest:
        """``adapter``: loaded if it isn't; ``is_restoring``: until ``restored``."""
        if adapter and adapter not in self.adapters.paths:
            packed = self.model.adapters.pack(Path(adapter))
            self.adapters.register(adapter, Path(adapter), packed)  # type: ignore[arg-type]
        number = next(self._numbers)
        request = GenerationRequest(
            request_id=str(number),
            params=params,
            priority=priority,
            cache_salt=salt,
            tenant=tenant,
            max_queue_s=max_queue_s,
        )
        slot = self.adapters.find(adapter)
        active = ActiveRequest(
            request,
            prompt,
            adapter=slot,
            prefix_seed=(b"" if slot is None else slot.prefix_seed) + salt.encode(),
            seed=number,
            arrival_s=self.now_s,
            stream=EventStream(lambda: None),
        )
        hashes = self.memory.hash_prompt(prompt, active.prefix_seed)
        max_len = min(self.model.info.max_model_len, self.memory.num_max_tokens)
        active.sequences = [
            Sequence(
                active,
                choice,
                key=(priority, number, choice),
                max_len=min(max_len, len(prompt) + (params.max_new_tokens or max_len)),
                end_ids=frozenset(params.stop_token_ids),
                hashes=hashes.copy(),
                detokenizer=TOKENIZER.detokenizer(),
                stop_matcher=None,
            )
            for choice in range(params.n)
        ]
        self.requests.append(active)
        self.scheduler.add(active.sequences, is_restoring=is_restoring)
        if is_restoring:
            self.restoring.append(active)
        return active

    def restored(self) -> None:
        """What the request that has waited longest for its prefix waits for has come."""
        if self.restoring:
            self.scheduler.restored(self.restoring.pop(0))

    def unload(self, adapter: str) -> None:
        if adapter in self.adapters.paths:
            self.num_leaving += 1
            self.adapters.unregister(adapter, self._note_freed)

    def _note_freed(self) -> None:
        self.num_leaving -= 1

    def step(
        self, *, fails: bool = False, abort: ActiveRequest | None = None, unload: str = ""
    ) -> bool:
        """Plan, execute, commit; ``abort`` and ``unload`` come while it is in flight. False:
        nothing ran."""
        self.now_s += 1.0
        num_expired = len(self.expired)
        submitted = self._in_flight or self._submit()
        if submitted is None:
            return len(self.expired) > num_expired
        following = self._submit_ahead(submitted) if self._runs_ahead else None
        if abort is not None:
            self.abort(abort)
        self.unload(unload)
        self._execute(submitted)
        if fails:
            self.failed.update(self.scheduler.fail(submitted))
        else:
            self.scheduler.commit(submitted)
        if fails and following is not None:
            self._execute(following)
            self.scheduler.drop(following)
            following = None
        self._in_flight = following
        self.scheduler.check_integrity()
        return True

    def _submit(self) -> Plan | None:
        waiting = {request for request in self.requests if request.is_waiting}
        plan = self.scheduler.plan(self.now_s)
        begun = {sequence.request for sequence in plan.sequences}
        begun |= {request for request in self.restoring if request.is_impatient}
        ends = {request: request.deadline_s for request in waiting - begun}
        late = {r for r, end_s in ends.items() if end_s is not None and end_s <= self.now_s}
        assert late == set(plan.expired)
        assert len(plan.expired) == len(late)
        self.expired |= late
        if not plan.sequences:
            assert not self.scheduler.has_work, "sequences wait, but none can run"
            return None
        fill(plan, next(self._steps))
        return self._checked(plan)

    def _submit_ahead(self, before: Plan) -> Plan | None:
        plan = self.scheduler.ahead.plan(before, self.now_s)
        assert all(sequence.row >= 0 for sequence in before.sequences), "preempted in flight"
        if plan is None:
            return None
        self.num_ahead += 1
        self.scheduler.ahead.fill(plan, next(self._steps))
        return self._checked(plan)

    def _checked(self, plan: Plan) -> Plan:
        assert sum(sequence.chunk[1] for sequence in plan.sequences) == plan.num_tokens
        assert plan.num_tokens == plan.step.num_tokens
        assert plan.num_tokens <= self.model.info.max_num_batched_tokens
        return plan

    def _execute(self, submitted: Plan) -> None:
        """What it follows was executed."""
        rows = submitted.logit_rows
        self.model.execute(submitted.step, [self._sampled[i] if i >= 0 else -1 for i in rows])
        self._sampled = [max(token_id, 0) for token_id in submitted.step.sampled()]

    def abort(self, request: ActiveRequest) -> None:
        if any(s.state is not SequenceState.FINISHED for s in request.sequences):
            self.aborted.add(request)
        self.scheduler.finish_all(request.sequences)

    def drain(self) -> None:
        while self.restoring:
            self.restored()
        assert self.scheduler.num_restoring == 0
        num_steps = 0
        while self.scheduler.has_work or self._in_flight:
            assert self.step(), "work is left but nothing runs"
            num_steps += 1
            assert num_steps < 20_000
        self.check_end()

    def check_end(self) -> None:
        assert self.scheduler.num_waiting == 0
        pool = self.model.pool
        assert pool.num_used == 0
        assert pool.num_available == pool.num_blocks
        assert self.memory.num_free_rows == self.model.info.max_num_seqs
        assert self.num_leaving == 0
        assert len(self.model.adapters.by_slot) == len(self.adapters.paths)
        for request in self.requests:
            for sequence in request.sequences:
                assert sequence.state is SequenceState.FINISHED
                if request in self.expired:
                    assert not sequence.num_generated
                elif request not in self.aborted and request not in self.failed:
                    self._check_tokens(sequence)

    def _check_tokens(self, sequence: Sequence) -> None:
        request = sequence.request
        prompt = request.prompt_ids
        expected = expected_tokens(
            prompt,
            request.request.params,
            seed=request.seed,
            choice=sequence.choice,
            max_total_tokens=min(self.model.info.max_model_len, self.memory.num_max_tokens),
        )
        assert sequence.token_ids[len(prompt) :].tolist() == expected
