"""A row's few largest inputs keep 16 bits, so that they don't coarsen the others."""

import numpy as np
import pytest

from lmi_core import _native
from tests.kernels.bf16 import as_float, to_bf16
from tests.kernels.products import assert_products, assert_same_bits

kernels = _native.kernels
LinearWeight = _native.LinearWeight
LEVELS = _native.instruction_sets()
FORMATS = {
    "int8": {"format": "int8"},
    "int4": {"format": "int4", "group_size": 128},
    "int4-32": {"format": "int4", "group_size": 32},
}
every_level = pytest.mark.parametrize("level", LEVELS)
every_format = pytest.mark.parametrize("name", FORMATS)


def rows_with_outliers(num_rows, num_columns, most, seed=0):
    """Each row with its own: row i has i % 9 columns that are up to ``most`` times larger."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((num_rows, num_columns), dtype=np.float32)
    for i, row in enumerate(x):
        row[rng.choice(num_columns, i % 9, replace=False)] *= rng.uniform(most / 2, most)
    return x


def read_rows(rows, num_columns, group_size):
    """(whole numbers, scales, high digits, sums) by the layout of csrc/cpu/packed_linear.h."""
    start = -(-num_columns // 128) * 128
    low = rows[:, :num_columns].copy().view(np.int8).astype(np.int32)
    words = rows[:, start:].copy().view(np.int32)
    scales, counts = words[:, 0].view(np.float32), words[:, 1]
    num_sums = 1 if group_size == 0 else -(-num_columns // group_size)
    high = np.zeros_like(low)
    for row, count in enumerate(counts):
        entries = words[row, 2 + num_sums : 2 + num_sums + count]
        columns = entries >> 8
        assert np.all(np.diff(columns) > 0)
        high[row, columns] = (entries & 0xFF).astype(np.uint8).view(np.int8)
        assert np.all(high[row, columns] != 0)
    step = group_size or num_columns
    expected = np.add.reduceat(low, range(0, num_columns, step), axis=1)
    assert np.array_equal(words[:, 2 : 2 + num_sums], expected)
    return low + 256 * high, scales, high


def scale_of(row):
    """The rule of ``RowRounding``, in plain words."""
    sizes = np.abs(row)
    most = len(row) // 32
    allowed = [t for t in sizes.max() / 2.0 ** np.arange(3, 10) if np.sum(sizes >= t) <= most]
    if not allowed:
        return sizes.max() / np.float32(127)
    below = sizes[sizes < 2 * min(allowed)].max(initial=0)
    return max(below, sizes.max() / np.float32(256)) / np.float32(127)


@every_level
@pytest.mark.parametrize("group_size", [0, 32, 128])
@pytest.mark.parametrize("num_columns", [31, 32, 100, 700, 4096])
@pytest.mark.parametrize("most", [3, 40, 5000])
def test_rows(level, num_columns, group_size, most):
    x = rows_with_outliers(27, num_columns, most)
    x[20, :] = 0
    x[20, 7] = 3
    rows = kernels.quantize_rows(level, x, group_size=group_size)
    q, scales, high = read_rows(rows, num_columns, group_size)
    assert np.array_equal(scales, [scale_of(row) for row in x])
    assert np.all(np.abs(q * scales[:, None].astype(np.float64) - x) <= 0.502 * scales[:, None])
    assert (high != 0).sum(1).max() <= num_columns // 32
    if num_columns == 4096 and most == 40:
        assert np.all((high != 0).sum(1) <= np.arange(27) % 9)
        assert np.all(scales < 0.15)
    assert np.array_equal(kernels.quantize_rows(level, x[5:6], group_size=group_size), rows[5:6])
    assert np.array_equal(rows, kernels.quantize_rows(LEVELS[0], x, group_size=group_size))


@every_level
def test_an_int8_row_has_one_scale(level):
    x = rows_with_outliers(9, 640, 60)
    q, scales, high = read_rows(kernels.quantize_rows(level, x, rounding="int8"), 640, 0)
    assert not high.any()
    assert np.array_equal(np.abs(q).max(1), np.full(9, 127))
    assert np.array_equal(scales, np.abs(x).max(1) / np.float32(127))
    weight = LinearWeight.pack([rows_with_outliers(20, 640, 1)], format="int8", rounding="int8")
    assert weight.rounding == "int8"
    w = weight.unpack().astype(np.float64)
    y = kernels.linear(level, x, weight)
    assert np.allclose(y, (q * scales[:, None].astype(np.float64)) @ w.T, rtol=1e-5, atol=1e-4)


@every_level
def test_norm_quantises_as_the_two_kernels_do(level):
    x = rows_with_outliers(9, 200, 30)
    weight = np.ones(200, np.float32)
    y = kernels.norm(level, x, weight, eps=1e-5)
    for rounding in ("int8", "outliers"):
        options = {"group_size": 64, "rounding": rounding}
        rows = kernels.norm(level, x, weight, eps=1e-5, out_dtype="int8", **options)
        assert np.array_equal(rows, kernels.quantize_rows(level, y, **options))


@every_level
@every_format
def test_inputs_may_be_in_another_order(level, name):
    x = rows_with_outliers(9, 384, 40)
    order = np.random.default_rng(1).permutation(384).astype(np.int32)
    weight = LinearWeight.pack([rows_with_outliers(20, 384, 1)], **FORMATS[name])
    same, unpacked = weight.row_format, weight.unpack()
    expected = kernels.linear(level, np.ascontiguousarray(x[:, order]), weight)
    weight.order_inputs(order)
    assert np.array_equal(kernels.linear(level, x, weight), expected)
    halves, widened = (
        kernels.linear(level, to_bf16(x), weight),
        as_float(to_bf16(x)).astype(np.float32),
    )
    assert np.array_equal(halves, kernels.linear(level, widened, weight))
    assert np.array_equal(weight.unpack()[:, order], unpacked)
    assert weight.row_format != same
    for wrong in (order[1:], np.append(order[1:], order[1])):
        with pytest.raises(_native.NativeError, match="each of 384 inputs once"):
            weight.order_inputs(wrong)


@every_level
@every_format
@pytest.mark.parametrize(
    ("num_inputs", "num_outputs"), [(33, 1), (255, 23), (513, 64), (3300, 130)]
)
def test_products(level, name, num_inputs, num_outputs):
    rng = np.random.default_rng(num_inputs)
    w = rng.standard_normal((num_outputs, num_inputs), dtype=np.float32)
    weight = LinearWeight.pack([w], **FORMATS[name])
    for num_rows in (1, 2, 3, 5, 6, 13, 31):
        x = rows_with_outliers(num_rows, num_inputs, 100, seed=num_rows)
        assert_products(level, x, weight, read_rows)


@every_format
@every_level
@pytest.mark.parametrize("gated", [False, True])
def test_same_bits_whatever_the_batch(level, name, gated):
    """Rows with the same outliers' columns, with others and with none beside each other."""
    rng = np.random.default_rng(3)
    parts = [rng.standard_normal((90, 1603), dtype=np.float32) for _ in range(2)]
    weight = LinearWeight.pack(parts, gated=gated, **FORMATS[name])
    options = {"activation": "silu"} if gated else {}
    x = rows_with_outliers(210, 1603, 100)
    x[100:, 17:1000:200] *= 300
    x = to_bf16(x)
    singles = [slice(i, i + 1) for i in range(0, 210, 13)]
    parts = [slice(-num_rows, None) for num_rows in (5, 6, 11, 97, 200)]
    assert_same_bits(level, x, weight, singles + parts, **options)


@every_level
@pytest.mark.parametrize(("name", "most"), [("int8", 0.012), ("int4", 0.012)])
def test_outliers_do_not_coarsen_the_others(level, name, most):
    """What rounding the rows costs beside the same product with what they were."""
    rng = np.random.default_rng(0)
    channels = np.ones(768, np.float32)
    channels[rng.choice(768, 6, replace=False)] = 100
    x = rng.standard_normal((20, 768), dtype=np.float32) * channels
    w = rng.standard_normal((64, 768), dtype=np.float32)
    weight = LinearWeight.pack([w / channels], **FORMATS[name])
    exact = x.astype(np.float64) @ weight.unpack().astype(np.float64).T
    error = kernels.linear(level, x, weight) - exact
    assert np.sqrt(np.mean(error**2)) <= most * exact.std()
    plain = LinearWeight.pack([w / channels], rounding="int8", **FORMATS[name])
    error = kernels.linear(level, x, plain) - exact
    assert np.sqrt(np.mean(error**2)) > 20 * most * exact.std()


@every_level
@every_format
@pytest.mark.parametrize("gated", [False, True])
def test_rows_that_are_not_rounded(level, name, gated):
    """To the bit what the unpacked matrix gives in fp32."""
    rng = np.random.default_rng(4)
    options = {"activation": "silu"} if gated else {}
    for num_inputs in (10, 33, 384, 901, 1200):
        parts = [rng.standard_normal((53, num_inputs), dtype=np.float32) for _ in range(2)]
        weight = LinearWeight.pack(parts, gated=gated, rounding="none", **FORMATS[name])
        assert weight.row_format is None
        unpacked = np.split(weight.unpack(), 2)
        exact = LinearWeight.pack(unpacked, gated=gated, format="fp32")
        x = rows_with_outliers(200, num_inputs, 100)
        halves = to_bf16(x)
        for num_rows in (1, 5, 7, 200):
            y = kernels.linear(level, x[:num_rows], weight, **options)
            assert np.array_equal(y, kernels.linear(level, x[:num_rows], exact, **options))
            y = kernels.linear(level, halves[:num_rows], weight, **options)
            widened = as_float(halves[:num_rows]).astype(np.float32)
            assert np.array_equal(y, kernels.linear(level, widened, exact, **options))


def test_roundings_that_do_not_exist():
    with pytest.raises(_native.NativeError, match="rounding 'bf8'; known are int8, outliers, none"):
        LinearWeight.pack([np.zeros((2, 2), np.float32)], format="int8", rounding="bf8")
