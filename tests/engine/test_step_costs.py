"""How deep drafts are follows from what rows were measured to cost."""

from __future__ import annotations

from lmi_core.engine.step_costs import StepCosts


def measured(seconds: dict[int, float]) -> StepCosts:
    costs = StepCosts()
    for num_rows, step_s in seconds.items():
        costs.note(num_rows, step_s)
    return costs


def depth(seconds: dict[int, float], chance: float) -> int:
    return measured(seconds).num_worthwhile(1, 1, [chance**i for i in range(1, 17)], ahead=True)


def test_drafts_are_as_deep_as_steps_with_them_are_cheap() -> None:
    cheap = {1: 1.0, 16: 1.2}
    assert depth(cheap, 0.95) == 16
    assert 2 <= depth(cheap, 0.6) <= 8
    assert depth({1: 1.0, 16: 16.0}, 0.95) == 0
    stairs = {1: 1.0, 4: 1.0, 5: 1.5, 8: 1.5, 16: 6.0}
    assert depth(stairs, 0.7) == 3
    assert depth(stairs, 0.99) == 7
    assert depth({}, 0.1) == 16  # nothing is known


def test_waiting_for_tokens_costs_the_gap_between_steps() -> None:
    costs = measured({1: 1.0, 2: 1.0})
    assert costs.num_worthwhile(1, 1, [0.01], ahead=True) == 1
    for _ in range(100):
        costs.note_gap(0.25, ahead=False)
    assert costs.num_worthwhile(1, 1, [0.24], ahead=True) == 0
    assert costs.num_worthwhile(1, 1, [0.26], ahead=True) == 1
    assert costs.num_worthwhile(1, 1, [0.01], ahead=False) == 1  # which waits anyway
    # Where the loop can't keep up with the steps, there is less to lose.
    for _ in range(100):
        costs.note_gap(0.2, ahead=True)
    assert costs.num_worthwhile(1, 1, [0.05], ahead=True) == 1


def test_costs_are_those_of_the_last_steps() -> None:
    costs = measured({1: 1.0, 2: 9.0})
    assert costs.num_worthwhile(1, 1, [1.0], ahead=True) == 0
    for _ in range(40):
        costs.note(2, 1.0)
    assert costs.num_worthwhile(1, 1, [1.0], ahead=True) == 1


def test_old_measurements_are_forgotten() -> None:
    """Else rows that were dear once would never be tried again."""
    costs = measured({2: 9.0, 1: 1.0})
    for _ in range(1001):
        costs.note(1, 1.0)
    assert costs.num_worthwhile(1, 1, [1.0], ahead=True) == 1
