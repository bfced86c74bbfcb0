"""The CPU's sampler: argmax, draws, filters, penalties and what is reported of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.kernels.paged import VECTORS
from tests.kernels.sampling_case import (
    FILTERS,
    chi_square,
    draw_many,
    log_softmax,
    mask_of,
    random_logits,
    sample,
)


@pytest.mark.parametrize("level", VECTORS)
@pytest.mark.parametrize("vocab", [1, 15, 17, 256, 257, 1000, 32003])
def test_greedy_is_argmax(level: str, vocab: int) -> None:
    logits = random_logits(5, vocab)
    logits[3, vocab // 2 :] = logits[3].max() + 1  # equals: the lowest id wins
    result = sample(level, logits, [{}] * 5, num_threads=2, stride=3)
    np.testing.assert_array_equal(result["ids"], logits.argmax(-1))
    expected = log_softmax(logits)[np.arange(5), result["ids"]]
    np.testing.assert_allclose(result["logprobs"], expected, atol=2e-6)
    assert (result["num_top"] == 0).all()


@pytest.mark.parametrize("level", VECTORS)
@pytest.mark.parametrize("vocab", [3, 18, 4096, 5000, 70001])
def test_top_logprobs(level: str, vocab: int) -> None:
    logits = random_logits(4, vocab, seed=1)
    logits[3] -= 60  # less than what lies behind the maxima of blocks
    logits[1] = np.round(logits[1])  # many equals
    logits[2] = -1.5
    counts = [5, 20, 20, 1]
    result = sample(level, logits, [{"num_logprobs": n, "temperature": 1.0} for n in counts])
    logprobs = log_softmax(logits)
    for row, count in enumerate(counts):
        count = min(count, vocab)
        order = np.lexsort((np.arange(vocab), -logits[row]))[:count]
        assert result["num_top"][row] == count
        np.testing.assert_array_equal(result["top_ids"][row, :count], order)
        np.testing.assert_allclose(
            result["top_logprobs"][row, :count], logprobs[row, order], atol=3e-6
        )


@pytest.mark.parametrize("level", VECTORS)
def test_targets_report_their_log_probability(level: str) -> None:
    logits = random_logits(3, 1234)
    targets = np.array([7, 1233, -1])
    result = sample(
        level,
        logits,
        [{"num_logprobs": 2}],
        sampling_rows=np.array([0, -1, -1]),
        target_ids=targets,
        max_logprobs=4,
    )
    expected = log_softmax(logits)
    np.testing.assert_allclose(result["logprobs"][0], expected[0, 7], atol=2e-6)
    np.testing.assert_allclose(result["logprobs"][1], expected[1, 1233], atol=2e-6)
    assert result["ids"].tolist() == [-1, -1, -1]
    assert result["num_top"].tolist() == [2, 4, 0]
    ranks = [1 + np.count_nonzero(logits[row] > logits[row, targets[row]]) for row in range(2)]
    assert result["target_ranks"].tolist() == [*ranks, 0]


@pytest.mark.parametrize("level", VECTORS)
def test_ranks_of_equals_are_those_of_their_ids(level: str) -> None:
    logits = np.zeros((5, 37), np.float32)
    logits[:, 5] = 1.0
    targets = np.array([0, 5, 6, 36, 3])
    logits[4, 7] = np.nan
    none = np.full(5, -1)
    result = sample(level, logits, [], sampling_rows=none, target_ids=targets, max_logprobs=0)
    assert result["target_ranks"].tolist() == [2, 1, 7, 37, 0]


@pytest.mark.parametrize("level", VECTORS)
def test_penalties_bias_and_bans(level: str) -> None:
    vocab = 700
    logits = random_logits(1, vocab, seed=3)
    row: dict[str, Any] = {
        "repetition_penalty": 1.7,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.9,
        "logit_bias": [(3, 2.5), (600, -1.0), (9, 4.0)],
        "seen": [(3, 2), (5, 0), (600, 1), (8, 0), (699, 3)],
        "banned_ids": [11, 12],
        "min_tokens": 4,
        "num_output": 3,
        "min_tokens_banned_ids": [13],
        "temperature": 1.0,
    }
    z = logits[0].astype(np.float64)
    for token, bias in row["logit_bias"]:
        z[token] += bias
    for token, num_output in row["seen"]:
        z[token] = z[token] / 1.7 if z[token] > 0 else z[token] * 1.7
        z[token] -= 0.4 * num_output + 0.9 * (num_output > 0)
    z[[11, 12, 13]] = -np.inf
    p = np.exp(log_softmax(z.astype(np.float32)))
    assert chi_square(draw_many(level, logits[0], {"seed": 1, **row}, 6000), p) < 4

    greedy = {**row, "temperature": 0.0}
    for boosted in [3, 5, 600, 13, 11]:  # whatever wins unmodified, the modified maximum is taken
        changed = logits.copy()
        changed[0, boosted] = logits.max() + 1
        result = sample(level, changed, [greedy])
        x = changed[0].astype(np.float64)
        for token, bias in row["logit_bias"]:
            x[token] += bias
        for token, num_output in row["seen"]:
            x[token] = x[token] / 1.7 if x[token] > 0 else x[token] * 1.7
            x[token] -= 0.4 * num_output + 0.9 * (num_output > 0)
        x[[11, 12, 13]] = -np.inf
        assert result["ids"][0] == x.argmax()
        expected = log_softmax(changed)[0, result["ids"][0]]
        np.testing.assert_allclose(result["logprobs"][0], expected, atol=2e-6)
    done = {"min_tokens": 4, "num_output": 4, "min_tokens_banned_ids": [13]}
    changed[0, 13] = 100
    assert sample(level, changed, [done])["ids"][0] == 13


@pytest.mark.parametrize("level", VECTORS)
@pytest.mark.parametrize("factor", [2.0, 3.0])
def test_what_is_scaled_stays_out_where_it_was(level: str, factor: float) -> None:
    """An infinity times 0 is no number, and times less than 0 the greatest there is."""
    logits = np.array([[0.5, -np.inf, 1.25, -1.0]], np.float32)
    row = {"num_output": 1, "length_factor": factor, "length_ids": [0, 1], "prompt_ids": [1]}
    wanted = 0 if factor > 2.5 else 2
    assert sample(level, logits, [row])["ids"].tolist() == [wanted]


@pytest.mark.parametrize("level", VECTORS)
def test_seed_choice_and_position_decide_and_nothing_else(level: str) -> None:
    logits = random_logits(1, 3000, seed=4)
    settings = [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 2.0, "top_k": 100, "frequency_penalty": 0.1, "seen": [(1, 1)]},
        {"temperature": 0.9, "typical_p": 0.8},
    ]
    many = np.repeat(logits, 60, axis=0)
    rows = [{**settings[i % 4], "seed": 2**63 + i // 20, "choice": i % 2} for i in range(60)]
    positions = np.arange(60) // 6
    together = sample(level, many, rows, positions=positions, num_threads=2, stride=0)
    for i in range(60):
        alone = sample(level, logits, [rows[i]], positions=positions[i : i + 1])
        assert alone["ids"][0] == together["ids"][i]
        assert alone["logprobs"][0] == together["logprobs"][i]
    again = sample(level, many, rows, positions=positions, stride=17)
    np.testing.assert_array_equal(again["ids"], together["ids"])
    base = {"temperature": 1.0, "seed": 1, "choice": 0}
    variants = [
        draw_many(level, logits[0], {**base, **v}, 50) for v in ({}, {"seed": 2}, {"choice": 1})
    ]
    assert not np.array_equal(variants[0], variants[1])
    assert not np.array_equal(variants[0], variants[2])


@pytest.mark.parametrize("level", VECTORS)
@pytest.mark.parametrize("settings", FILTERS[:1] + FILTERS[4:6] + FILTERS[11:] + [{}], ids=str)
def test_broken_rows_fail_alone(level: str, settings: dict[str, Any]) -> None:
    vocab = 600
    logits = random_logits(5, vocab)
    logits[0, 555] = np.nan
    logits[1] = -np.inf
    logits[2, 3] = np.inf
    rows: list[dict[str, Any]] = [{**settings, "num_logprobs": 3} for _ in range(5)]
    rows[3]["banned_ids"] = list(range(vocab))
    result = sample(level, logits, rows)
    assert result["ids"][:4].tolist() == [-1] * 4
    assert 0 <= result["ids"][4] < vocab
    assert result["num_top"].tolist() == [0, 0, 0, 3, 3]


@pytest.mark.parametrize("level", VECTORS)
@pytest.mark.parametrize("vocab", [1, 17, 300, 5003])
@pytest.mark.parametrize("settings", [{}, *FILTERS, {"temperature": 1.0}], ids=str)
def test_rows_without_log_probabilities_draw_the_same_tokens(
    level: str, vocab: int, settings: dict[str, Any]
) -> None:
    """And refuse the same rows, though they read less of them."""
    logits = random_logits(12, vocab, seed=vocab)
    logits[3, vocab // 2] = np.nan
    logits[5] = -np.inf
    logits[7, vocab - 1] = np.inf
    logits[9, 1:] = -np.inf
    reported = sample(level, logits, [{"seed": 4, "num_logprobs": 0, **settings}] * 12)
    silent = sample(level, logits, [{"seed": 4, "num_logprobs": -1, **settings}] * 12)
    np.testing.assert_array_equal(silent["ids"], reported["ids"])
    assert [silent["ids"][row] for row in (3, 5, 7)] == [-1] * 3
    assert not silent["logprobs"].any()
    assert not silent["num_top"].any()


@pytest.mark.parametrize("level", VECTORS)
@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}], ids=str
)
def test_masked_logits_are_never_drawn(level: str, settings: dict[str, Any]) -> None:
    logits = np.full(1000, -np.inf, np.float32)
    logits[[4, 300, 999]] = [1.0, 1.5, 0.5]
    ids = draw_many(level, logits, {"seed": 3, **settings}, 200)
    assert set(ids) <= {4, 300, 999}
    top = sample(level, logits[None], [{"num_logprobs": 5}])
    assert top["top_ids"][0, : top["num_top"][0]].tolist() == [300, 4, 999]


@pytest.mark.parametrize("level", VECTORS)
@pytest.mark.parametrize("vocab", [1, 31, 33, 300, 5003])
@pytest.mark.parametrize("settings", [{}, *FILTERS[:2], *FILTERS[4:8], FILTERS[11]], ids=str)
def test_a_mask_is_as_bans_of_all_other_tokens(
    level: str, vocab: int, settings: dict[str, Any]
) -> None:
    """To the bit; and rows without a mask don't notice those beside them."""
    rng = np.random.default_rng(vocab)
    logits = random_logits(40, vocab, seed=vocab)
    rows: list[dict[str, Any]] = [
        {"seed": i, "num_logprobs": 2, "logit_bias": [(0, 1.5)] * (i % 2), **settings}
        for i in range(40)
    ]
    masks: dict[int, npt.NDArray[np.uint32]] = {}
    banned = [dict(row) for row in rows]
    for i in range(0, 40, 2):
        allowed = np.flatnonzero(rng.random(vocab) < [0.5, 0.01, 1.0][i % 3])
        masks[i] = mask_of(allowed, vocab)
        banned[i]["banned_ids"] = np.setdiff1d(np.arange(vocab), allowed).tolist()
    result = sample(level, logits, rows, masks=masks, num_threads=2, stride=7)
    expected = sample(level, logits, banned)
    free = sample(level, logits, rows)
    for i in range(40):
        same = expected if i in masks else free
        assert result["ids"][i] == same["ids"][i]
        if result["ids"][i] < 0:
            continue  # its other results mean nothing
        assert result["logprobs"][i] == same["logprobs"][i]
        num_top = same["num_top"][i]
        assert result["num_top"][i] == num_top
        for name in ("top_ids", "top_logprobs"):
            np.testing.assert_array_equal(result[name][i, :num_top], same[name][i, :num_top])


@pytest.mark.parametrize("level", VECTORS)
def test_an_empty_mask_gives_no_token_and_a_full_one_changes_none(level: str) -> None:
    logits = random_logits(3, 1000)
    rows = [{"temperature": 1.0, "seed": i} for i in range(3)]
    masks = {0: mask_of([], 1000), 1: mask_of(np.arange(1000), 1000)}
    ids = sample(level, logits, rows, masks=masks)["ids"]
    assert ids.tolist() == [-1, *sample(level, logits, rows)["ids"][1:]]


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Philox 4x32-10 (Salmon et al. 2011)."""
    mask = 0xFFFFFFFF
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = b >> 32 ^ c1 ^ k0, b & mask, a >> 32 ^ c3 ^ k1, a & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0, c1, c2, c3


def test_philox_reference_gives_the_published_vectors() -> None:
    zeros = philox((0, 0), (0, 0, 0, 0))
    assert zeros == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    pi = philox((0xA4093822, 0x299F31D0), (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344))
    assert pi == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


@pytest.mark.parametrize("level", VECTORS)
def test_random_numbers_are_philox(level: str) -> None:
    """Over 256 equal logits the token is the upper byte of the random number."""
    logits = np.zeros((40, 256), np.float32)
    rows = [{"temperature": 1.0, "seed": i * 0x123456789ABCDEF, "choice": i % 3} for i in range(40)]
    positions = np.arange(40) * 1000
    ids = sample(level, logits, rows, positions=positions)["ids"]
    for i, row in enumerate(rows):
        key = (row["seed"] & 0xFFFFFFFF, row["seed"] >> 32)
        assert ids[i] == philox(key, (int(positions[i]), row["choice"], 0, 0))[0] >> 24
