from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lmi_core import _native
from tests.kernels.paged import LEVELS

Runner = _native.paged_kernels.Runner
SamplingRows = _native.paged_kernels.SamplingRows

Logits = npt.NDArray[np.float32]


def random_logits(rows: int, vocab: int, seed: int = 0, spread: float = 3.0) -> Logits:
    return np.random.default_rng(seed).standard_normal((rows, vocab), np.float32) * spread


def sample(
    level: str,
    logits: Logits,
    rows: list[dict[str, Any]],
    *,
    positions: Any = None,
    sampling_rows: Any = None,
    target_ids: Any = None,
    max_logprobs: int = 20,
    masks: dict[int, npt.NDArray[np.uint32]] | None = None,
    num_threads: int = 1,
    stride: int = 1,
) -> dict[str, Any]:
    count = len(logits)
    runner = Runner(level, num_threads=num_threads, stride=stride)
    result: dict[str, Any] = runner.sample(
        logits,
        SamplingRows(rows, logits.shape[1]),
        sampling_rows=np.arange(count) if sampling_rows is None else sampling_rows,
        positions=np.arange(count) if positions is None else positions,
        target_ids=np.full(count, -1) if target_ids is None else target_ids,
        max_logprobs=max_logprobs,
        masks=masks or {},
    )
    return result


def mask_of(token_ids: Any, vocab: int) -> npt.NDArray[np.uint32]:
    """A bit per token id, lowest first."""
    bits = np.zeros((vocab + 31) // 32 * 32, np.uint8)
    bits[np.asarray(token_ids, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def draw_many(level: str, logits: Logits, row: dict[str, Any], count: int) -> npt.NDArray[np.int32]:
    """Tokens at positions 0 .. count - 1 from the same row of logits."""
    result = sample(
        level,
        np.broadcast_to(logits, (count, logits.size)).copy(),
        [row],
        sampling_rows=np.zeros(count),
        positions=np.arange(count),
    )
    ids: npt.NDArray[np.int32] = result["ids"]
    return ids


def log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    x = logits.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    result: npt.NDArray[np.float64] = x - np.log(np.exp(x).sum(-1, keepdims=True))
    return result


def filtered_probabilities(
    logits: Logits,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    typical_p: float = 1.0,
) -> npt.NDArray[np.float64]:
    """The distribution that a row with these settings samples from, by sorting everything."""
    p = np.exp(log_softmax(logits / np.float32(temperature)))
    order = np.lexsort((np.arange(p.size), -logits))
    if top_k:
        p[order[top_k:]] = 0
        p /= p.sum()
    if top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= top_p]] = 0
        p /= p.sum()
    if min_p > 0:
        p[p < min_p * p.max()] = 0
        p /= p.sum()
    if typical_p < 1:
        surprise = -np.log(np.where(p > 0, p, 1))
        distance = np.where(p > 0, abs(surprise - (p * surprise).sum()), np.inf)
        order = np.lexsort((np.arange(p.size), distance))
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= typical_p]] = 0
        p /= p.sum()
    return p


def chi_square(ids: npt.NDArray[np.int32], p: npt.NDArray[np.float64]) -> float:
    """(chi^2 - df) / sqrt(2 df) over the tokens, rare ones pooled: about standard normal."""
    assert (p[ids] > 0).all(), "a token outside the distribution's support was drawn"
    observed = np.bincount(ids, minlength=p.size).astype(float)
    expected = p * ids.size
    frequent = expected >= 10
    observed = np.append(observed[frequent], observed[~frequent].sum())
    expected = np.append(expected[frequent], expected[~frequent].sum())
    if expected[-1] < 1:
        observed, expected = observed[:-1], expected[:-1]
    if expected.size < 2:
        return 0.0
    degrees = expected.size - 1
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float((statistic - degrees) / np.sqrt(2 * degrees))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("vocab", [1, 15, 17, 256, 257, 1000, 32003])
def test_greedy_is_argmax(level: str, vocab: int) -> None:
    logits = random_logits(5, vocab)
    logits[3, vocab // 2 :] = logits[3].max() + 1  # equals: the lowest id wins
    result = sample(level, logits, [{}] * 5, num_threads=2, stride=3)
    np.testing.assert_array_equal(result["ids"], logits.argmax(-1))
    expected = log_softmax(logits)[np.arange(5), result["ids"]]
    np.testing.assert_allclose(result["logprobs"], expected, atol=2e-6)
    assert (result["num_top"] == 0).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("vocab", [3, 18, 5000, 70001])
def test_top_logprobs(level: str, vocab: int) -> None:
    logits = random_logits(4, vocab, seed=1)
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


@pytest.mark.parametrize("level", LEVELS)
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


FILTERS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 40},
    {"temperature": 2.0, "top_k": 3000},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 4.0, "top_p": 0.95},
    {"temperature": 1.0, "top_p": 0.01},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.5, "min_p": 1.0},
    {"temperature": 1.3, "top_k": 50, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 2.0, "top_p": 0.7, "min_p": 0.1},
    {"temperature": 2.0, "top_k": 2000, "top_p": 0.7},
    {"temperature": 1.0, "typical_p": 0.95},
    {"temperature": 4.0, "typical_p": 0.5},
    {"temperature": 0.3, "typical_p": 0.2},
    {"temperature": 1.5, "top_k": 60, "typical_p": 0.7},
    {"temperature": 2.0, "top_p": 0.8, "min_p": 0.01, "typical_p": 0.6},
]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("settings", FILTERS, ids=str)
@pytest.mark.parametrize("vocab", [300, 5001])
def test_distribution(level: str, settings: dict[str, Any], vocab: int) -> None:
    logits = random_logits(1, vocab, seed=2, spread=2.0)[0]
    p = filtered_probabilities(logits, **settings)
    ids = draw_many(level, logits, {"seed": 11, **settings}, 4000)
    assert chi_square(ids, p) < 4


@pytest.mark.parametrize("level", LEVELS)
def test_every_kept_token_and_no_other_is_drawn(level: str) -> None:
    """Nearly flat logits, so that the support itself shows."""
    logits = np.linspace(0.1, 0, 64, dtype=np.float32)
    for settings in [{"top_k": 10}, {"top_p": 0.3}, {"min_p": 0.97}, {"typical_p": 0.4}]:
        p = filtered_probabilities(logits, temperature=1.0, **settings)  # type: ignore[arg-type]
        ids = draw_many(level, logits, {"temperature": 1.0, "seed": 5, **settings}, 3000)
        np.testing.assert_array_equal(np.unique(ids), np.flatnonzero(p))


@pytest.mark.parametrize("level", LEVELS)
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


@pytest.mark.parametrize("level", LEVELS)
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


@pytest.mark.parametrize("level", LEVELS)
def test_top_k_among_equals_keeps_the_lowest_ids(level: str) -> None:
    ids = draw_many(level, np.zeros(1000, np.float32), {"temperature": 1.0, "top_k": 7}, 500)
    assert set(ids) == set(range(7))


@pytest.mark.parametrize("level", LEVELS)
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


@pytest.mark.parametrize("level", LEVELS)
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


@pytest.mark.parametrize("level", LEVELS)
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


@pytest.mark.parametrize("level", LEVELS)
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


@pytest.mark.parametrize("level", LEVELS)
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


@pytest.mark.parametrize("level", LEVELS)
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


@pytest.mark.parametrize("level", LEVELS)
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


@pytest.mark.parametrize("level", LEVELS)
def test_random_numbers_are_philox(level: str) -> None:
    """Over 256 equal logits the token is the upper byte of the random number."""
    logits = np.zeros((40, 256), np.float32)
    rows = [{"temperature": 1.0, "seed": i * 0x123456789ABCDEF, "choice": i % 3} for i in range(40)]
    positions = np.arange(40) * 1000
    ids = sample(level, logits, rows, positions=positions)["ids"]
    for i, row in enumerate(rows):
        key = (row["seed"] & 0xFFFFFFFF, row["seed"] >> 32)
        assert ids[i] == philox(key, (int(positions[i]), row["choice"], 0, 0))[0] >> 24
