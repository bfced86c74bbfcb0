"""Tenants in the scheduler: what one asks for doesn't cost the others theirs."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.engine.sequence import ActiveRequest, SequenceState
from tests.engine.scheduler_history import History


def ask(history: History, tenant: str, num_prompt: int = 8, num_new: int = 12) -> ActiveRequest:
    number = len(history.requests)
    prompt = [number % 256, number // 256, *range(num_prompt - 2)]
    return history.arrive(prompt, SamplingParams(max_new_tokens=num_new), tenant=tenant)


def generated(history: History) -> Counter[str]:
    counts: Counter[str] = Counter()
    for request in history.requests:
        counts[request.request.tenant] += request.sequences[0].num_generated
    return counts


def jain(values: list[int]) -> float:
    """1 where all have the same, 1 / n where one has everything (Jain et al., 1984)."""
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


@pytest.mark.parametrize("seed", range(3))
def test_who_asks_eight_times_as_much_is_served_as_the_others(seed: int) -> None:
    random = Random(seed)
    history = History(max_num_seqs=8, num_blocks=200)
    for tenant in "a" * 200 + "bcdefgh" * 25:
        ask(history, tenant, random.randint(4, 30), random.randint(4, 30))
    for _ in range(250):
        history.step()
    assert jain(list(generated(history).values())) > 0.95
    history.drain()


def test_one_tenants_requests_run_in_the_order_of_arrival() -> None:
    history = History(max_num_seqs=2)
    requests = [ask(history, "a") for _ in range(6)]
    ends: list[int] = []
    while history.scheduler.has_work:
        history.step()
        for number, request in enumerate(requests):
            if request.sequences[0].state is SequenceState.FINISHED and number not in ends:
                ends.append(number)
    assert ends == sorted(ends)


def test_a_row_is_given_up_to_a_tenant_that_has_none() -> None:
    history = History(max_num_seqs=4, num_blocks=200)
    flood = [ask(history, "flood", num_new=100) for _ in range(20)]
    for _ in range(10):
        history.step()
    light = ask(history, "light")
    history.step()
    assert light.sequences[0].state is SequenceState.RUNNING
    states = [request.sequences[0].state for request in flood[:4]]
    assert states == [*[SequenceState.RUNNING] * 3, SequenceState.WAITING]
    again = [ask(history, "light") for _ in range(3)]
    for _ in range(4):  # until the flood was served as much again
        history.step()
    # Half of the rows are its part.
    assert [request.sequences[0].state for request in again] == [
        SequenceState.RUNNING,
        SequenceState.WAITING,
        SequenceState.WAITING,
    ]
    assert history.scheduler.num_preemptions == 2
    history.drain()


def test_no_row_is_given_up_where_nobody_may_be_preempted_or_is_more_urgent() -> None:
    kept = History(max_num_seqs=2, num_blocks=200, guaranteed_no_evict=True)
    for _ in range(4):
        ask(kept, "flood", num_new=60)
    kept.step()
    ask(kept, "light")
    kept.drain()
    assert kept.scheduler.num_preemptions == 0
    urgent = History(max_num_seqs=2, num_blocks=200)
    for _ in range(4):
        urgent.arrive([1, 2], SamplingParams(max_new_tokens=60), tenant="flood", priority=-1)
    urgent.step()
    ask(urgent, "light")
    urgent.drain()
    assert urgent.scheduler.num_preemptions == 0


def test_who_is_in_flight_keeps_its_row() -> None:
    """One whose tenant was served more, but not much more, comes back while a step is in flight."""
    for num_steps in range(4, 40, 2):
        history = History(max_num_seqs=4, num_blocks=400, max_num_batched_tokens=8, runs_ahead=True)
        ask(history, "flood", num_new=400)
        back = ask(history, "back", num_prompt=40, num_new=1)
        while not back.sequences[0].num_generated:
            history.step()
        for _ in range(8):
            ask(history, "flood", num_prompt=60, num_new=100)
        for _ in range(num_steps):
            history.step()
        back = ask(history, "back")
        for _ in range(20):
            history.step()
        assert back.sequences[0].num_generated


def test_the_more_urgent_goes_first_whatever_its_tenant_was_served() -> None:
    history = History(max_num_seqs=1, num_blocks=200)
    ask(history, "a", num_new=30)
    others = [ask(history, "b", num_new=4) for _ in range(3)]
    urgent = history.arrive([9], SamplingParams(max_new_tokens=4), tenant="a", priority=-1)
    while urgent.sequences[0].state is not SequenceState.FINISHED:
        history.step()
    assert [other.sequences[0].num_generated for other in others] == [0, 0, 0]
    history.drain()


def test_a_short_prompt_goes_before_the_rest_of_anothers_long_one() -> None:
    history = History(max_num_batched_tokens=32, num_blocks=200)
    ask(history, "light", num_new=40)
    history.step()
    long = ask(history, "flood", num_prompt=200)
    history.step()
    assert 0 < long.sequences[0].num_computed < 50
    short = ask(history, "light")
    history.step()
    assert short.sequences[0].num_generated == 1
    history.drain()


def test_without_memory_the_tenant_that_runs_most_gives_way() -> None:
    history = History(num_blocks=8, max_model_len=120, max_num_seqs=4)
    flood = [ask(history, "flood", num_prompt=20, num_new=90) for _ in range(2)]
    light = ask(history, "light", num_prompt=20, num_new=90)
    while not history.scheduler.num_preemptions:
        history.step()
    assert light.sequences[0].state is SequenceState.RUNNING
    assert SequenceState.WAITING in [request.sequences[0].state for request in flood]
    history.drain()


def test_nobody_saves_up_while_others_are_served() -> None:
    history = History(max_num_seqs=2, num_blocks=200)
    for _ in range(60):
        ask(history, "a")
        ask(history, "b")
    for _ in range(150):
        history.step()
    for _ in range(60):
        ask(history, "late")
    before = generated(history)
    for _ in range(150):
        history.step()
    more = generated(history) - before
    assert jain(list(more.values())) > 0.9, more
    history.drain()


def test_a_flood_decodes_with_what_light_tenants_leave() -> None:
    """A light tenant's prompts go before its 60 rows, in steps without them, which are shorter
    where a light one decodes, and nobody starves."""
    history = History(
        max_num_seqs=64,
        num_blocks=1000,
        max_num_batched_tokens=256,
        max_logit_rows=64,
        num_saturating_tokens=90,
    )
    flood = [ask(history, "flood", num_new=100) for _ in range(60)]
    while any(not request.sequences[0].num_generated for request in flood):
        history.step()
    light = [ask(history, "light", num_prompt=80, num_new=30) for _ in range(2)]
    texts = [light[i].sequences[0] for i in range(2)]
    before = generated(history)["flood"]
    history.step()
    assert [text.num_computed for text in texts] == [80, 0]
    history.step()
    assert [text.num_computed for text in texts] == [81, 57]  # 13/20 of 90, and one decodes
    history.step()
    assert [text.num_generated for text in texts] == [3, 1]
    assert generated(history)["flood"] == before
    for _ in range(4):
        counts, before = generated(history), generated(history)
        history.step()
        counts = generated(history)
        assert counts["light"] == before["light"] + 2
        assert 20 <= counts["flood"] - before["flood"] <= 28
    history.drain()


def test_a_light_tenant_that_was_served_much_more_is_light_no_more() -> None:
    history = History(
        max_num_seqs=16,
        num_blocks=1000,
        max_num_batched_tokens=64,
        max_logit_rows=16,
        num_saturating_tokens=30,
    )
    for _ in range(15):
        ask(history, "flood", num_new=200)
    for _ in range(12):
        history.step()
    num_steps = num_flood = 0
    for _ in range(120):
        greedy = ask(history, "greedy", num_prompt=120, num_new=1)
        while greedy.sequences[0].state is not SequenceState.FINISHED:
            before = generated(history)["flood"]
            history.step()
            num_steps += 1
            num_flood += generated(history)["flood"] > before
    assert num_flood > num_steps / 4
    history.drain()


def test_the_first_of_a_long_queue_is_found_among_tenants() -> None:
    """Whoever comes, leaves or has another priority: as if all of them were looked at."""
    random, history = Random(2), History(max_num_seqs=1)
    queues = history.scheduler.queues
    for number in range(400):
        if random.random() < 0.6 or len(queues.waiting) < 2:
            tenant, priority = random.choice("abcde"), random.choice([0, 0, 0, -1])
            prompt = [number % 256, number // 256, 1, 2]
            history.arrive(
                prompt, SamplingParams(max_new_tokens=4), priority=priority, tenant=tenant
            )
        else:
            history.scheduler.finish(random.choice(queues.waiting))
        assert queues.first() is min(queues.waiting, key=queues.order)
        assert {s.request.request.tenant for s in queues.waiting} == queues._of_tenants.keys()
