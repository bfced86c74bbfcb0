"""Sampling rows of logits, and the distributions that they are to be drawn from."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lmi_core import _native

Runner = _native.paged_kernels.Runner
SamplingRows = _native.paged_kernels.SamplingRows

Logits = npt.NDArray[np.float32]
NEUTRAL: dict[str, Any] = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "seed": 0,
    "choice": 0,
    "num_logprobs": 0,
    "banned_ids": [],
    "min_tokens": 0,
    "min_tokens_banned_ids": [],
}
"""All that ``SamplingTable.set`` asks for, of a row with the likeliest tokens."""


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
    epsilon_cutoff: float = 0.0,
    eta_cutoff: float = 0.0,
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
    if epsilon_cutoff > 0:
        p[p < min(epsilon_cutoff, p.max())] = 0
        p /= p.sum()
    if eta_cutoff > 0:
        entropy = -(p * np.log(np.where(p > 0, p, 1))).sum()
        p[p < min(eta_cutoff, eta_cutoff**0.5 * np.exp(-entropy), p.max())] = 0
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
    {"temperature": 1.0, "epsilon_cutoff": 0.003},
    {"temperature": 1.3, "eta_cutoff": 0.02},
    {"temperature": 3.0, "epsilon_cutoff": 0.9},
    {"temperature": 1.5, "epsilon_cutoff": 0.001, "eta_cutoff": 0.01},
    {"temperature": 1.5, "top_k": 60, "epsilon_cutoff": 0.01},
    {"temperature": 2.0, "typical_p": 0.8, "epsilon_cutoff": 0.002, "eta_cutoff": 0.01},
]
