"""Filters of the distribution that a token is drawn from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels.paged import VECTORS
from tests.kernels.sampling_case import (
    FILTERS,
    chi_square,
    draw_many,
    filtered_probabilities,
    random_logits,
)


@pytest.mark.parametrize("level", VECTORS)
@pytest.mark.parametrize("settings", FILTERS, ids=str)
@pytest.mark.parametrize("vocab", [300, 5001])
def test_distribution(level: str, settings: dict[str, Any], vocab: int) -> None:
    logits = random_logits(1, vocab, seed=2, spread=2.0)[0]
    p = filtered_probabilities(logits, **settings)
    ids = draw_many(level, logits, {"seed": 11, **settings}, 4000 if vocab == 300 else 1500)
    assert chi_square(ids, p) < 4


@pytest.mark.parametrize("level", VECTORS)
def test_every_kept_token_and_no_other_is_drawn(level: str) -> None:
    """Nearly flat logits, so that the support itself shows."""
    logits = np.linspace(0.1, 0, 64, dtype=np.float32)
    for settings in [{"top_k": 10}, {"top_p": 0.3}, {"min_p": 0.97}, {"typical_p": 0.4}]:
        p = filtered_probabilities(logits, temperature=1.0, **settings)  # type: ignore[arg-type]
        ids = draw_many(level, logits, {"temperature": 1.0, "seed": 5, **settings}, 3000)
        np.testing.assert_array_equal(np.unique(ids), np.flatnonzero(p))


@pytest.mark.parametrize("level", VECTORS)
@pytest.mark.parametrize("settings", [{}, {"top_k": 299}, {"top_p": 0.999999}], ids=str)
@pytest.mark.parametrize(("first", "typical_p"), [(6.0, 0.5), (3.0, 0.9), (4.7, 0.3)])
def test_typical_tokens_need_not_be_the_likeliest(
    level: str, settings: dict[str, Any], first: float, typical_p: float
) -> None:
    """One likely token and many less likely ones: which are typical depends on their masses."""
    logits = random_logits(1, 300, seed=8, spread=0.3)[0]
    logits[150] = first
    settings = {"temperature": 1.0, "typical_p": typical_p, **settings}
    p = filtered_probabilities(logits, **settings)
    assert (p[150] == 0) == (first != 6.0)
    ids = draw_many(level, logits, {"seed": 6, **settings}, 20000)
    np.testing.assert_array_equal(np.unique(ids), np.flatnonzero(p))
    assert chi_square(ids, p) < 4


@pytest.mark.parametrize("level", VECTORS)
def test_typical_among_equals_keeps_the_lowest_ids(level: str) -> None:
    logits = np.full(1000, -np.inf, np.float32)
    logits[[3, *range(200, 999)]] = 0.5
    ids = draw_many(level, logits, {"temperature": 1.0, "typical_p": 0.0095}, 500)
    assert set(ids) == {3, *range(200, 207)}


@pytest.mark.parametrize("typical_p", [0.05, 0.5, 0.95])
def test_typical_sets_are_those_of_transformers(typical_p: float) -> None:
    """The warper of Transformers agrees with the reference that the samplers are tested against."""
    torch = pytest.importorskip("torch", exc_type=ImportError)
    process = pytest.importorskip("transformers.generation.logits_process", exc_type=ImportError)
    logits = random_logits(20, 500, seed=7)
    kept = process.TypicalLogitsWarper(typical_p)(None, torch.from_numpy(logits)).isfinite().numpy()
    for row in range(20):
        p = filtered_probabilities(logits[row], temperature=1.0, typical_p=typical_p)
        np.testing.assert_array_equal(np.flatnonzero(p), np.flatnonzero(kept[row]))


@pytest.mark.parametrize("cutoff", [0.0005, 0.01, 0.9])
@pytest.mark.parametrize("name", ["epsilon", "eta"])
def test_cutoffs_are_those_of_transformers(name: str, cutoff: float) -> None:
    torch = pytest.importorskip("torch", exc_type=ImportError)
    process = pytest.importorskip("transformers.generation.logits_process", exc_type=ImportError)
    logits = random_logits(20, 500, seed=7)
    warper = getattr(process, f"{name.capitalize()}LogitsWarper")(cutoff)
    kept = warper(None, torch.from_numpy(logits)).isfinite().numpy()
    for row in range(20):
        p = filtered_probabilities(logits[row], temperature=1.0, **{f"{name}_cutoff": cutoff})
        np.testing.assert_array_equal(np.flatnonzero(p), np.flatnonzero(kept[row]))


@pytest.mark.parametrize("level", VECTORS)
def test_top_k_among_equals_keeps_the_lowest_ids(level: str) -> None:
    ids = draw_many(level, np.zeros(1000, np.float32), {"temperature": 1.0, "top_k": 7}, 500)
    assert set(ids) == set(range(7))
