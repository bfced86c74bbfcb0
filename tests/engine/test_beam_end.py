"""When a beam search ends, on texts whose probabilities are written down."""

from __future__ import annotations

from typing import Any

import pytest

from lmi_core.engine.beam_search import BeamSearch
from lmi_core.engine.ranked_tokens import RankedBans
from lmi_core.engine.sampling_params import SamplingParams

END = 0
RARE = [(8, -9.0), (9, -9.5)]
LATE_ENDS: dict[tuple[int, ...], list[tuple[int, float]]] = {
    (): [(1, -0.5), (END, -0.6), (2, -1.0)],
    (1,): [(3, -0.01), (END, -0.5)],
    (2,): [(3, -0.5)],
    (1, 3): [(END, -0.01)],
}
SHORT_ENDS = {
    (): [(1, -0.1), (END, -0.3), (2, -0.9)],
    (1,): [(3, -0.02), (END, -0.04)],
    (2,): [(3, -0.1)],
    (1, 3): [(END, -0.001)],
}


def one_beam(end: float, other: float) -> dict[tuple[int, ...], list[tuple[int, float]]]:
    """A text of two tokens that ends with that sum, or goes on with the other one."""
    return {
        (): [(1, -0.1)],
        (1,): [(END, end + 0.1), (3, other + 0.1)],
        (1, 3): [(4, -0.005)],
        (1, 3, 4): [(END, -0.005)],
    }


@pytest.mark.parametrize(
    ("table", "changes", "texts", "num_steps"),
    [
        (LATE_ENDS, {"early_stopping": True}, [[1, END], [END]], 2),
        (LATE_ENDS, {"early_stopping": False}, [[1, 3, END], [1, END]], 3),
        (one_beam(-0.5, -0.8), {"early_stopping": False}, [[1, END]], 2),
        # 0.8 / 4 is less than 0.5 / 2, 0.8 / 3 is more.
        (one_beam(-0.5, -0.8), {"early_stopping": "never"}, [[1, 3, 4, END]], 4),
        # 0.9 / 4 is more than 0.4 / 2, 0.9 / 5 is less.
        (one_beam(-0.4, -0.9), {"early_stopping": "never"}, [[1, END]], 2),
        # Where long texts are worth less, the best that a text can be is what it is now.
        (SHORT_ENDS, {"early_stopping": "never", "length_penalty": -1.0}, [[1, END], [END]], 3),
    ],
)
def test_when_it_ends(
    table: dict[tuple[int, ...], list[tuple[int, float]]],
    changes: dict[str, Any],
    texts: list[list[int]],
    num_steps: int,
) -> None:
    params = SamplingParams(num_beams=len(texts), n=len(texts), max_new_tokens=4, **changes)
    ends = frozenset([END])
    bans = RankedBans(
        params, ends, field="num_beams", num_needed=4, vocab_size=10, max_ranked=10, bans=None
    )
    search = BeamSearch(params, ends, max_tokens=4, bans=bans)
    beams: list[tuple[int, ...]] = [()]
    steps = 0
    while search.results is None:
        steps += 1
        for number, beam in enumerate(beams):
            search.note(number, [*table.get(beam, []), *RARE])
        moves = search.moves()
        beams = [(*beams[move.parent], move.token_id) for move in moves]
        search.follow(moves)
    assert ([each.token_ids for each in search.results], steps) == (texts, num_steps)
