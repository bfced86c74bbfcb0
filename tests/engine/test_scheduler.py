"""Random histories of the scheduler as a pure state machine, checked after every step."""

from __future__ import annotations

from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.engine.sequence import SequenceState
from lmi_core.engine.step_filling import fill
from tests.engine.scheduler_history import History

PARAMS = st.builds(
    SamplingParams,
    max_new_tokens=st.integers(1, 40),
    temperature=st.sampled_from([0.0, 1.0]),
    n=st.sampled_from([1, 1, 1, 2, 5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    stop_token_ids=st.sampled_from([(), tuple(range(0, 256, 16))]),
    min_new_tokens=st.sampled_from([0, 0, 1]),
    prompt_logprobs=st.sampled_from([None, None, 1]),
)
# Prompts share prefixes often, and end at, before and after block boundaries.
PROMPTS = st.builds(
    lambda family, length: [family, *range(1, length)], st.integers(0, 2), st.integers(1, 70)
)
TENANTS = st.sampled_from("xyz")
ADAPTERS = st.sampled_from(["", "", "x", "y"])
ARRIVALS = st.tuples(
    st.sampled_from(["arrive", "arrive", "restore"]),
    *(PROMPTS, PARAMS, st.integers(0, 2), st.sampled_from("ab"), ADAPTERS, TENANTS),
    st.none() | st.floats(0.0, 30.0),
)
EVENTS = st.lists(
    st.one_of(
        ARRIVALS,
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("abort in flight"), st.integers(0, 30)),
        st.tuples(st.just("unload"), ADAPTERS),
        st.tuples(st.just("unload in flight"), ADAPTERS),
        st.tuples(st.just("fail")),
        st.tuples(st.just("restored")),
        st.tuples(st.just("run"), st.integers(1, 12)),
    ),
    min_size=1,
    max_size=25,
)


def play(history: History, events: list[tuple]) -> None:  # type: ignore[type-arg]
    for kind, *details in events:
        if kind in ("arrive", "restore"):
            prompt, params, priority, salt, adapter, tenant, max_queue_s = details
            limit = min(history.model.info.max_model_len, history.memory.num_max_tokens) - 1
            history.arrive(
                prompt[:limit],
                params,
                priority=priority,
                salt=salt,
                adapter=adapter,
                tenant=tenant,
                is_restoring=kind == "restore",
                max_queue_s=max_queue_s,
            )
        elif kind == "restored":
            history.restored()
        elif kind == "run":
            for _ in range(details[0]):
                history.step()
        elif kind == "unload":
            history.unload(details[0])
        elif kind == "unload in flight":
            history.step(unload=details[0])
        elif kind == "fail":
            history.step(fails=True)
        elif history.requests:
            request = history.requests[details[0] % len(history.requests)]
            if kind == "abort":
                history.abort(request)
            else:
                history.step(abort=request)
    history.drain()


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(
    events=EVENTS,
    num_blocks=st.integers(3, 40),
    max_num_seqs=st.integers(1, 6),
    num_batched_tokens=st.integers(6, 80),
    max_logit_rows=st.integers(6, 20),
    num_saturating_tokens=st.none() | st.integers(1, 90),
    enable_prefix_caching=st.booleans(),
    guaranteed_no_evict=st.booleans(),
    runs_ahead=st.booleans(),
)
def test_random_histories(
    events: list[tuple],  # type: ignore[type-arg]
    num_blocks: int,
    max_num_seqs: int,
    num_batched_tokens: int,
    max_logit_rows: int,
    num_saturating_tokens: int | None,
    enable_prefix_caching: bool,
    guaranteed_no_evict: bool,
    runs_ahead: bool,
) -> None:
    history = History(
        runs_ahead=runs_ahead,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=num_batched_tokens,
        max_logit_rows=max_logit_rows,
        num_saturating_tokens=num_saturating_tokens,
        max_model_len=128,
        enable_prefix_caching=enable_prefix_caching,
        guaranteed_no_evict=guaranteed_no_evict,
    )
    play(history, events)
    if guaranteed_no_evict:
        assert history.scheduler.num_preemptions == 0


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_adapters_come_and_go_while_requests_run(seed: int, runs_ahead: bool) -> None:
    """Prompts are alike, so that any wrong hash or slot shows."""
    random = Random(seed)
    history = History(num_blocks=9, max_num_seqs=4, max_model_len=128, runs_ahead=runs_ahead)
    for _ in range(250):
        kind = random.choice(["arrive", "arrive", "step", "step", "step", "abort", "unload"])
        adapter = random.choice(["", "x", "y", "z"])
        if kind == "arrive":
            params = SamplingParams(max_new_tokens=random.randrange(1, 70), n=random.choice([1, 2]))
            history.arrive(list(range(random.randrange(16, 60))), params, adapter=adapter)
        elif kind == "step":
            history.step(fails=random.random() < 0.03)
        elif kind == "unload":
            history.step(unload=adapter)
        elif history.requests:
            history.step(abort=random.choice(history.requests[-4:]), unload=adapter)
    history.drain()
    assert history.scheduler.num_preemptions


def test_a_slot_is_kept_until_no_step_refers_to_it() -> None:
    history = History()
    request = history.arrive([1, 2, 3], SamplingParams(max_new_tokens=9), adapter="x")
    plan = history.scheduler.plan(history.now_s)
    fill(plan, history.model.steps[0])
    history.unload("x")
    history.abort(request)
    assert history.num_leaving == 1
    history.model.execute(history.model.steps[0])
    history.scheduler.commit(plan)
    assert history.num_leaving == 0
    assert not history.model.adapters.by_slot


def test_a_slot_is_used_again() -> None:
    history = History()
    for _ in range(3):
        first = history.arrive(list(range(40)), SamplingParams(max_new_tokens=2), adapter="x")
        history.drain()
        assert first.num_cached_tokens == 0
        again = history.arrive(list(range(40)), SamplingParams(max_new_tokens=2), adapter="x")
        history.drain()
        assert again.num_cached_tokens == 32
        assert list(history.model.adapters.by_slot) == [0]
        history.unload("x")


def test_who_may_not_wait_begins_once_its_prefix_is_there_or_never() -> None:
    history = History(max_num_seqs=2)
    history.arrive([1], SamplingParams(max_new_tokens=30))
    history.step()
    params = SamplingParams(max_new_tokens=9)
    first, late = (
        history.arrive([number], params, is_restoring=True, max_queue_s=0.0) for number in (2, 3)
    )
    history.step()
    assert not history.expired
    for num_generated in (1, 2):
        history.restored()
        history.step()
        assert first.sequences[0].num_generated == num_generated
    assert history.expired == {late}
    history.drain()


def test_decode_rows_go_before_prompt_chunks() -> None:
    history = History(max_num_batched_tokens=8)
    decoding = history.arrive([1], SamplingParams(max_new_tokens=30))
    history.step()
    history.arrive(list(range(60)), SamplingParams(max_new_tokens=2))
    for _ in range(8):
        history.step()
    assert decoding.sequences[0].num_generated == 9
    history.drain()


def test_prompts_are_finished_in_the_order_of_arrival() -> None:
    history = History(max_num_batched_tokens=64, num_saturating_tokens=24)
    params = SamplingParams(max_new_tokens=20)
    prompts = [history.arrive([number, *range(15)], params) for number in range(4)]
    generated = []
    for _ in range(4):
        history.step()
        generated.append([prompt.sequences[0].num_generated for prompt in prompts])
    # 16 tokens of the first and 8 of the second, then a row of the first, 8 and 15, then ...
    assert generated == [[1, 0, 0, 0], [2, 1, 0, 0], [3, 2, 1, 1], [4, 3, 2, 2]]
    history.drain()


def test_a_prompt_alone_fills_the_budget_and_one_beside_decode_rows_does_not() -> None:
    history = History(max_num_batched_tokens=64, num_saturating_tokens=24)
    first = history.arrive(list(range(64)), SamplingParams(max_new_tokens=30)).sequences[0]
    history.step()
    assert first.num_generated == 1
    second = history.arrive(list(range(100, 164)), SamplingParams(max_new_tokens=30)).sequences[0]
    history.step()
    assert (first.num_generated, second.num_computed) == (2, 23)
    history.drain()


def test_decode_rows_leave_prompts_half_of_an_efficient_step() -> None:
    history = History(max_num_seqs=16, max_logit_rows=32, num_saturating_tokens=16, num_blocks=200)
    for number in range(14):
        history.arrive([number], SamplingParams(max_new_tokens=30))
    history.step()
    prompt = history.arrive(list(range(64)), SamplingParams(max_new_tokens=1)).sequences[0]
    history.step()
    assert prompt.num_computed == 8
    history.drain()


def test_the_newest_is_preempted_first() -> None:
    history = History(num_blocks=6, max_model_len=96)
    old = history.arrive([1, *range(30)], SamplingParams(max_new_tokens=40)).sequences[0]
    new = history.arrive([2, *range(15)], SamplingParams(max_new_tokens=40)).sequences[0]
    while not history.scheduler.num_preemptions:
        history.step()
    assert old.state is SequenceState.RUNNING
    assert new.state is SequenceState.WAITING
    history.drain()


def test_a_waiting_request_too_big_for_now_holds_later_ones_back() -> None:
    history = History(num_blocks=4, max_model_len=64)
    history.arrive(list(range(40)), SamplingParams(max_new_tokens=20))
    history.step()
    big = history.arrive([7, *range(40)], SamplingParams(max_new_tokens=2))
    small = history.arrive([8], SamplingParams(max_new_tokens=2))
    history.step()
    assert big.sequences[0].state is SequenceState.WAITING
    assert small.sequences[0].state is SequenceState.WAITING
    history.drain()


def test_who_waits_leaves_those_that_run_a_block_each_to_grow_into() -> None:
    history = History(num_blocks=6, max_model_len=96)
    params = SamplingParams(max_new_tokens=10)
    for number in (1, 2):
        history.arrive([number, *range(29)], params)
    history.step()
    late = history.arrive([3, *range(29)], params).sequences[0]
    history.step()
    assert late.state is SequenceState.WAITING
    history.drain()
    assert history.scheduler.num_preemptions == 0


def test_a_heavy_tenant_runs_where_who_is_light_waits_behind_its_own() -> None:
    history = History(max_num_seqs=6, num_saturating_tokens=1)
    params = SamplingParams(max_new_tokens=9)
    history.arrive([1], SamplingParams(max_new_tokens=9, n=5), tenant="heavy")
    history.step()
    history.step()
    history.arrive([2], params, tenant="heavy", priority=1)
    history.arrive([3], params, tenant="light", priority=2)
    history.drain()
