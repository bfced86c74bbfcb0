"""How deep drafts are follows from what rows were measured to cost."""

from __future__ import annotations

from lmi_core._native import StepCosts


def measured(seconds: dict[int, float]) -> StepCosts:
    costs = StepCosts()
    for num_rows, step_s in seconds.items():
        costs.note(num_rows, step_s)
    return costs


def depth(seconds: dict[int, float], chance: float) -> int:
    chances = [chance**i for i in range(1, 17)]
    return measured(seconds).depths(1, 1, [chances], 16, ahead=True)[0]


def is_worthwhile(costs: StepCosts, chance: float, *, ahead: bool = True) -> bool:
    return costs.depths(1, 1, [[chance]], 1, ahead=ahead) == [1]


def test_drafts_are_as_deep_as_steps_with_them_are_cheap() -> None:
    cheap = {1: 1.0, 16: 1.2}
    assert depth(cheap, 0.95) == 16
    assert 2 <= depth(cheap, 0.6) <= 8
    assert depth({1: 1.0, 16: 16.0}, 0.95) == 0
    stairs = {1: 1.0, 4: 1.0, 5: 1.5, 8: 1.5, 16: 6.0}
    assert depth(stairs, 0.7) == 3
    assert depth(stairs, 0.99) == 7
    assert depth({}, 0.9) == 16  # nothing is known
    assert depth({}, 0.2) == 1  # nor is what hardly comes worth a thought


def test_the_likeliest_drafts_of_all_sequences_get_the_rows() -> None:
    chances = [[0.9, 0.5, 0.2], [], [0.8, 0.7], [0.04]]
    free = measured({4: 1.0, 16: 1.0})
    assert free.depths(4, 4, chances, 16, ahead=True) == [3, 0, 2, 0]
    assert free.depths(4, 4, chances, 3, ahead=True) == [1, 0, 2, 0]
    assert free.depths(4, 4, chances, 0, ahead=True) == [0] * 4
    dear = measured({4: 1.0, 6: 1.1, 7: 2.0})
    assert dear.depths(4, 4, chances, 16, ahead=True) == [1, 0, 1, 0]


def test_a_step_that_was_held_up_says_nothing_of_its_rows() -> None:
    costs = measured({1: 1.0, 2: 9.0, 4: 1.1})
    assert costs.seconds(2, ahead=False) == 1.1
    assert is_worthwhile(costs, 0.2)


def test_a_draft_models_steps_are_counted() -> None:
    target, drafting = measured({1: 1.0, 16: 1.2}), measured({1: 0.1, 16: 0.1})

    def common(chance: float, num_sequences: int = 1, extra_s: float = 0.0, most: int = 8) -> int:
        chances = [chance] * num_sequences
        step = num_sequences, num_sequences, most, extra_s
        return target.common_depth(drafting, chances, *step, ahead=True)

    assert common(1.0) == 8
    assert common(1.0, most=3) == 3
    assert 1 <= common(0.6) <= 3
    assert common(0.1) == 0
    assert common(0.6, extra_s=1.5) == 0
    assert common(0.9, num_sequences=4) == 0  # whose steps weren't measured
    target.note(4, 1.04)
    assert common(0.9, num_sequences=4) > 2
    assert common(0.9, num_sequences=0) == 0
    assert target.common_depth(StepCosts(), [0.1], 1, 1, 8, 0.0, ahead=True) == 8


def test_waiting_for_tokens_costs_the_gap_between_steps() -> None:
    costs = measured({1: 1.0, 2: 1.0})
    assert is_worthwhile(costs, 0.06)
    for _ in range(100):
        costs.note_gap(0.25, ahead=False)
    assert not is_worthwhile(costs, 0.24)
    assert is_worthwhile(costs, 0.26)
    assert is_worthwhile(costs, 0.06, ahead=False)  # which waits anyway
    # Where the loop can't keep up with the steps, there is less to lose.
    for _ in range(100):
        costs.note_gap(0.2, ahead=True)
    assert is_worthwhile(costs, 0.06)


def test_costs_are_those_of_the_last_steps() -> None:
    costs = measured({1: 1.0, 2: 9.0})
    assert not is_worthwhile(costs, 1.0)
    for _ in range(40):
        costs.note(2, 1.0)
    assert is_worthwhile(costs, 1.0)


def test_steps_without_drafts_are_measured_again() -> None:
    costs = measured({2: 9.0, 1: 1.0})
    for _ in range(1001):
        costs.note(2, 1.0)
    assert not is_worthwhile(costs, 1.0)
    costs.note(1, 1.0)
    assert is_worthwhile(costs, 1.0)


def test_old_measurements_are_forgotten() -> None:
    """Else rows that were dear once would never be tried again."""
    costs = measured({2: 9.0, 1: 1.0})
    for _ in range(1001):
        costs.note(1, 1.0)
    assert is_worthwhile(costs, 1.0)
