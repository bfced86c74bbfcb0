"""Priorities in the scheduler: who is more urgent doesn't wait for others' ends."""

from __future__ import annotations

import pytest

from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.engine.sequence import ActiveRequest, SequenceState
from tests.engine.scheduler_history import History

RUNNING, WAITING = SequenceState.RUNNING, SequenceState.WAITING


def ask(
    history: History, priority: int, num_prompt: int = 8, num_new: int = 60, n: int = 1
) -> ActiveRequest:
    prompt = [len(history.requests) % 256, *range(num_prompt - 1)]
    params = SamplingParams(max_new_tokens=num_new, n=n)
    return history.arrive(prompt, params, priority=priority)


def states(requests: list[ActiveRequest]) -> list[SequenceState]:
    return [request.sequences[0].state for request in requests]


def test_the_urgent_takes_the_row_of_the_least_urgent() -> None:
    history = History(max_num_seqs=3, num_blocks=200)
    others = [ask(history, priority) for priority in (5, 9, 5)]
    for _ in range(3):
        history.step()
    urgent = ask(history, 0)
    history.step()
    assert states([urgent, *others]) == [RUNNING, RUNNING, WAITING, RUNNING]
    assert urgent.sequences[0].num_generated == 1
    more = [ask(history, 0) for _ in range(3)]
    history.step()
    history.step()
    assert states([*more, *others]) == [RUNNING, RUNNING, WAITING, WAITING, WAITING, WAITING]
    assert history.scheduler.num_preemptions == 3
    history.drain()


def test_the_urgent_gets_memory_of_the_less_urgent_one_after_the_other() -> None:
    history = History(max_num_seqs=6, num_blocks=8, max_model_len=120)
    others = [ask(history, 1, num_prompt=30, num_new=20) for _ in range(3)]
    while states(others) != [RUNNING] * 3:
        history.step()
    urgent = ask(history, 0, num_prompt=90, num_new=4)
    steps = 0
    while urgent.sequences[0].state is not RUNNING:
        history.step()
        steps += 1
    assert steps <= 4  # one to be refused, and one for each
    assert WAITING in states(others)
    history.drain()


def test_choices_of_an_urgent_request_find_rows() -> None:
    history = History(max_num_seqs=4, num_blocks=200)
    others = [ask(history, 1) for _ in range(4)]
    history.step()
    urgent = ask(history, 0, n=3, num_new=30)
    for _ in range(4):
        history.step()
    assert [sequence.state for sequence in urgent.sequences] == [RUNNING] * 3
    assert states(others).count(RUNNING) == 1
    history.drain()


@pytest.mark.parametrize(("priority", "keeps_all"), [(1, False), (0, True)])
def test_who_is_as_urgent_waits(priority: int, keeps_all: bool) -> None:
    """Nor does anybody give way where no sequence is ever preempted."""
    history = History(max_num_seqs=2, num_blocks=200, guaranteed_no_evict=keeps_all)
    others = [ask(history, 1, num_new=20) for _ in range(2)]
    history.step()
    late = ask(history, priority)
    history.step()
    assert states([*others, late]) == [RUNNING, RUNNING, WAITING]
    history.drain()
    assert history.scheduler.num_preemptions == 0
