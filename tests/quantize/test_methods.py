"""Codes and factors of ``lmi quantize``, beside what they are made of."""

from __future__ import annotations

import numpy as np
import pytest

from lmi_core.quantize.awq import Sample, best_factors
from lmi_core.quantize.gptq import Hessian, gptq
from lmi_core.quantize.grids import Coded, Grid, round_to_nearest
from lmi_core.quantize.stored import rounded_to
from lmi_core.quantize.words import pack_awq, pack_columns, pack_rows
from lmi_core.weights.formats import FloatArray
from lmi_core.weights.quantized.words import unpack_awq, unpack_columns, unpack_rows


def grid_of(num_bits: int, group_size: int, *, is_symmetric: bool = True) -> Grid:
    return Grid(num_bits, group_size, is_symmetric, lambda values: rounded_to(values, "F16"))


def weights_and_inputs() -> tuple[FloatArray, FloatArray]:
    """A matrix [48, 256], and rows of inputs that depend on each other, some of them large."""
    random = np.random.default_rng(4)
    mix = random.standard_normal((256, 256)) * 0.06
    rows = random.standard_normal((1024, 256)) @ (np.eye(256) + mix)
    rows[:, random.choice(256, 8, replace=False)] *= 20
    weights = random.standard_normal((48, 256))
    return weights.astype(np.float32), rows.astype(np.float32)


def change(coded: Coded, weights: FloatArray, rows: FloatArray) -> float:
    return float(((rows @ (coded.floats() - weights).T) ** 2).mean())


@pytest.mark.parametrize("num_bits", [4, 8])
def test_words_are_read_back(num_bits: int) -> None:
    codes = np.random.default_rng(1).integers(0, 1 << num_bits, (24, 40), np.uint8)
    assert np.array_equal(unpack_rows(pack_rows(codes, num_bits), num_bits), codes)
    assert np.array_equal(unpack_columns(pack_columns(codes, num_bits), num_bits).T, codes)
    if num_bits == 4:
        assert np.array_equal(unpack_awq(pack_awq(codes)).T, codes)


@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize(("num_bits", "group_size"), [(4, 32), (4, 128), (8, 0)])
def test_no_weight_is_further_from_its_code_than_the_range_allows(
    num_bits: int, group_size: int, is_symmetric: bool
) -> None:
    weights, _ = weights_and_inputs()
    coded = round_to_nearest(weights, grid_of(num_bits, group_size, is_symmetric=is_symmetric))
    assert coded.codes.max() < 1 << num_bits
    steps = np.repeat(coded.scales, 256 // coded.scales.shape[1], axis=1)
    error = np.abs(coded.floats() - weights) / steps
    is_inside = (coded.codes > 0) & (coded.codes < (1 << num_bits) - 1)
    assert error[is_inside].max() <= 0.501
    assert np.mean(error**2) < 0.12  # of numbers rounded to the nearest: 1/12


@pytest.mark.parametrize("group_size", [32, 128, 0])
def test_gptq_changes_less_of_what_inputs_that_depend_on_each_other_give(group_size: int) -> None:
    weights, rows = weights_and_inputs()
    hessian = Hessian()
    for piece in np.split(rows, 4):
        hessian.add(piece)
    grid = grid_of(4, group_size)
    found = gptq(weights, grid, hessian.measured())
    assert change(found, weights, rows) < 0.6 * change(
        round_to_nearest(weights, grid), weights, rows
    )


def test_the_largest_inputs_first_change_less() -> None:
    weights, rows = weights_and_inputs()
    plain, ordered = Hessian(), Hessian(by_size=True)
    plain.add(rows)
    ordered.add(rows)
    grid = grid_of(4, 32)
    by_size = gptq(weights, grid, ordered.measured())
    assert sorted(by_size.groups) == sorted(grid.groups(256))
    assert (np.diff(by_size.groups) != 0).sum() > 100
    in_order = gptq(weights, grid, plain.measured())
    assert change(by_size, weights, rows) < change(in_order, weights, rows)


def test_gptq_takes_inputs_that_are_never_there_and_fewer_rows_than_inputs() -> None:
    weights, rows = weights_and_inputs()
    rows = rows[:40].copy()
    rows[:, 7] = 0
    hessian = Hessian()
    hessian.add(rows)
    grid = grid_of(4, 64)
    found = gptq(weights, grid, hessian.measured())
    assert np.isfinite(found.floats()).all()
    assert change(found, weights, rows) < change(round_to_nearest(weights, grid), weights, rows)


def test_awq_gives_large_inputs_finer_steps() -> None:
    weights, rows = weights_and_inputs()
    sample = Sample()
    for piece in np.split(rows, 4):
        sample.add(piece)
    grid = grid_of(4, 128, is_symmetric=False)
    factors = best_factors(weights, sample, grid, lambda numbers: numbers)
    large = sample.mean > 5
    assert large.sum() == 8
    assert factors[large].min() > factors[~large].max()
    scaled = round_to_nearest(weights * factors, grid)
    plain = round_to_nearest(weights, grid)
    assert change(scaled, weights * factors, rows / factors) < 0.7 * change(plain, weights, rows)
