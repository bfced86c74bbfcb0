"""What the sampling table adds to logits behind a text."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from lmi_core import _native
from tests.kernels.sampling_case import NEUTRAL

VOCAB_SIZE = 12
Biases = list[tuple[list[int], float]]


def expected(biases: Biases, text: list[int]) -> dict[int, float]:
    """One bias of a token: the sum of its own, those of single tokens first."""
    found: dict[int, np.float32] = {}
    for ids, bias in sorted(biases, key=lambda each: len(each[0]) > 1):
        *before, token_id = ids
        is_within = len(ids) == 1 or len(ids) <= len(text)
        if is_within and text[len(text) - len(before) :] == before:
            found[token_id] = found.get(token_id, np.float32(0)) + np.float32(bias)
    return {token_id: float(bias) for token_id, bias in found.items()}


def added(table: _native.SamplingTable, row: int) -> dict[int, float]:
    _, ids, values = table.gather([row])["biases"]
    assert len(set(ids.tolist())) == len(ids), "several biases of one token"
    return dict(zip(ids.tolist(), values.tolist(), strict=True))


def test_biases_behind_a_text_are_those_of_its_last_tokens() -> None:
    """Of a text that comes token by token, and of one that is observed at once, by rows that share
    the biases."""
    rng = random.Random(0)
    text = [rng.randrange(4) for _ in range(60)]
    biases: Biases = [
        ([rng.randrange(4) for _ in range(rng.choice([1, 1, 2, 2, 3, 5]))], rng.uniform(-3, 3))
        for _ in range(80)
    ]
    shared = _native.LogitBiases([7], [0.5], biases)
    assert shared.num_last == 5
    table = _native.SamplingTable(2, VOCAB_SIZE)
    table.set(0, **NEUTRAL, biases=shared)
    for count in range(len(text) + 1):
        table.set(1, **NEUTRAL, biases=shared)
        table.observe_prompt(1, text[: count // 2])
        table.observe_many(1, text[count // 2 : count])
        want = expected([([7], 0.5), *biases], text[:count])
        assert added(table, 0) == added(table, 1) == want
        if count < len(text):
            table.observe(0, text[count])


def test_a_watermark_and_a_bias_of_a_token_are_one() -> None:
    table = _native.SamplingTable(1, VOCAB_SIZE)
    marked = {**NEUTRAL, "watermark_gamma": 0.5, "watermark_delta": 2.0}
    table.set(0, **marked, biases=_native.LogitBiases(range(VOCAB_SIZE), [1.0] * VOCAB_SIZE))
    _, ids, values = table.gather([0], [], [3])["biases"]
    assert sorted(ids.tolist()) == list(range(VOCAB_SIZE))
    assert sorted(values.tolist()) == [1.0] * 6 + [3.0] * 6


@pytest.mark.parametrize(
    ("ids", "error"),
    [
        ([2, VOCAB_SIZE], "token id 12 of 12"),
        (np.array([2, VOCAB_SIZE], np.int32), "token id 12 of 12"),
        (np.array([2, -1], np.int64), "token id -1 of 12"),
        (np.array([2**32 + 5]), "doesn't fit 32 bits"),
        (np.array([2**63 + 5], np.uint64), "long|int"),
        (np.array([1.7]), "array of integers, not float64"),
        (np.array([True]), "array of integers, not bool"),
        (np.array([[1]], np.int32), "not int32 of 2 dimensions"),
        ([1.7], "float"),
    ],
)
@pytest.mark.parametrize(
    "name", ["banned_ids", "min_tokens_banned_ids", "prompt_ids", "length_ids"]
)
def test_ids_that_are_none_leave_the_row_as_it_was(name: str, ids: object, error: str) -> None:
    table = _native.SamplingTable(1, VOCAB_SIZE)
    before = {**NEUTRAL, "banned_ids": [3], "temperature": 0.5}
    table.set(0, **before)
    after: dict[str, Any] = {**NEUTRAL, "banned_ids": [4], "temperature": 0.7, name: ids}
    with pytest.raises((RuntimeError, TypeError, OverflowError), match=error):
        table.set(0, **after)
    gathered = table.gather([0])
    assert gathered["temperature"].tolist() == [0.5]
    assert gathered["bans"][1].tolist() == [3]


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8])
def test_ids_of_any_width_and_stride(dtype: type) -> None:
    table = _native.SamplingTable(1, VOCAB_SIZE)
    settings: dict[str, Any] = {**NEUTRAL, "banned_ids": np.arange(10, dtype=dtype)[::3]}
    table.set(0, **settings)
    assert table.gather([0])["bans"][1].tolist() == [0, 3, 6, 9]


def test_what_is_gathered_outlives_the_table() -> None:
    table = _native.SamplingTable(2, VOCAB_SIZE)
    for row, reward in enumerate((2.0, 0.5)):
        table.set(row, **NEUTRAL, prompt_reward=reward, prompt_ids=np.arange(row + 1))
    rows, ids, above, below = table.gather([1, 0])["scales"]
    del table
    assert (rows.tolist(), ids.tolist()) == ([0, 0, 1], [0, 1, 0])
    assert (above.tolist(), below.tolist()) == ([0.5, 0.5, 2.0], [2.0, 2.0, 0.5])
