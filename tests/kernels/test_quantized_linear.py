"""int8 and int4 weights: their packing, quantised rows, and the linear kernel over both."""

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
    "int4-64": {"format": "int4", "group_size": 64},
    "int4-32": {"format": "int4", "group_size": 32},
}
every_level = pytest.mark.parametrize("level", LEVELS)
every_format = pytest.mark.parametrize("name", FORMATS)


def normal(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def read_rows(rows, num_columns, group_size=0):
    """(q, scale, sums) of quantised rows, by the layout of csrc/cpu/packed_linear.h."""
    start = -(-num_columns // 128) * 128
    num_sums = 1 if group_size == 0 else -(-num_columns // group_size)
    q = rows[:, :start].copy().view(np.int8)
    assert not q[:, num_columns:].any()
    scales = rows[:, start : start + 4].copy().view(np.float32)[:, 0]
    sums = rows[:, start + 8 : start + 8 + 4 * num_sums].copy().view(np.int32)
    return q[:, :num_columns], scales, sums


@every_level
@pytest.mark.parametrize("group_size", [0, 32, 128])
@pytest.mark.parametrize("num_columns", [1, 15, 64, 129, 700])
def test_rows_are_quantised_each_on_its_own(level, num_columns, group_size):
    rng = np.random.default_rng(num_columns)
    x = normal(rng, 9, num_columns) * 10.0 ** rng.integers(-6, 7, (9, 1)).astype(np.float32)
    x[3] = 0
    for source in (x, to_bf16(x)):
        rows = kernels.quantize_rows(level, source, group_size=group_size)
        q, scales, sums = read_rows(rows, num_columns, group_size)
        exact = as_float(source)
        most = np.abs(exact).max(axis=1)
        assert np.allclose(scales, most / 127, rtol=1e-6, atol=0)
        error = np.abs(q * scales[:, None].astype(np.float64) - exact)
        assert np.all(error <= 0.5001 * scales[:, None])
        assert np.array_equal(np.abs(q).max(axis=1), np.where(most > 0, 127, 0))
        step = group_size or num_columns
        expected = np.add.reduceat(q.astype(np.int32), range(0, num_columns, step), axis=1)
        assert np.array_equal(sums, expected)
        alone = kernels.quantize_rows(level, source[4:5], group_size=group_size)
        assert np.array_equal(rows[4:5], alone)


@every_level
def test_a_row_that_is_not_finite_is_nan_and_no_other(level):
    rng = np.random.default_rng(0)
    x = normal(rng, 4, 40)
    x[1, 39], x[2, 0] = np.inf, np.nan
    w = LinearWeight.pack([normal(rng, 18, 40)], format="int8")
    y = kernels.linear(level, x, w)
    assert np.array_equal(np.isnan(y).all(axis=1), [False, True, True, False])
    assert np.array_equal(np.isnan(y).any(axis=1), [False, True, True, False])


@every_level
@pytest.mark.parametrize("group_size", [0, 64])
def test_norm_quantises_as_the_two_kernels_do(level, group_size):
    rng = np.random.default_rng(1)
    x, weight = normal(rng, 5, 200), normal(rng, 200)
    y = kernels.norm(level, x, weight, eps=1e-5)
    rows = kernels.norm(level, x, weight, eps=1e-5, out_dtype="int8", group_size=group_size)
    assert np.array_equal(rows, kernels.quantize_rows(level, y, group_size=group_size))


@every_level
@pytest.mark.parametrize("num_inputs", [1, 4, 63, 256, 1030, 4100])
@pytest.mark.parametrize("extreme", [False, True])
def test_int8_integers_are_exact(level, num_inputs, extreme):
    """Scales of 1: results are integers, also where instructions for 16 bits would saturate."""
    rng = np.random.default_rng(num_inputs)
    signs = rng.choice([-127, 127], (2, 40, num_inputs))
    small = rng.integers(-127, 128, (2, 40, num_inputs))
    x, w = (signs if extreme else small).astype(np.float32)
    if extreme:
        w[:20] = x[:20] = 127
    x[:, 0] = w[:, 0] = 127
    weight = LinearWeight.pack([w], format="int8")
    assert np.allclose(weight.unpack(), w, rtol=1e-6)
    for num_rows in (1, 6, 11, 40):
        y = kernels.linear(level, x[:num_rows], weight)
        exact = x[:num_rows].astype(np.int64) @ w.astype(np.int64).T
        # Sums beyond 24 bits and scales next to 1 are rounded to floats.
        assert np.all(np.abs(y - exact) <= 3e-7 * np.abs(exact))


@every_level
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("extreme", [False, True])
def test_int4_integers_are_exact(level, group_size, extreme):
    """Also the largest products, of which 16 bits would hold the sums of nine quads no more."""
    rng = np.random.default_rng(group_size)
    x = rng.integers(-127, 128, (13, 300)).astype(np.float32)
    w = rng.integers(-8, 8, (50, 300)).astype(np.float32)
    if extreme:
        x[:3], x[3:9], w[:20] = 127, -127, 7
    x[:, 0], w[:, ::group_size] = 127, -8
    weight = LinearWeight.pack([w], format="int4", group_size=group_size)
    assert np.array_equal(weight.unpack(), w)
    assert np.array_equal(kernels.linear(level, x, weight), x @ w.T)


@every_level
@every_format
@pytest.mark.parametrize("num_inputs", [1, 7, 64, 255, 513, 3300])
@pytest.mark.parametrize("num_outputs", [1, 16, 23, 64, 130])
def test_matches_reference(level, name, num_inputs, num_outputs):
    rng = np.random.default_rng(num_inputs * 1000 + num_outputs)
    weight = LinearWeight.pack([normal(rng, num_outputs, num_inputs)], **FORMATS[name])
    for num_rows in (1, 2, 3, 4, 5, 6, 7, 12, 13, 31, 67):
        assert_products(level, normal(rng, num_rows, num_inputs), weight, read_rows)


@every_level
@every_format
@pytest.mark.parametrize("gated", [False, True])
def test_same_bits_whatever_the_batch(level, name, gated):
    rng = np.random.default_rng(3)
    parts = [normal(rng, 180, 3203) for _ in range(2)]
    weight = LinearWeight.pack(parts, gated=gated, **FORMATS[name])
    options = {"activation": "silu"} if gated else {}
    x = to_bf16(normal(rng, 260, 3203))
    singles = [slice(i, i + 1) for i in range(0, 70, 7)]
    parts = [slice(num_rows) for num_rows in (2, 5, 6, 7, 11, 32, 96, 97, 200)]
    assert_same_bits(level, x, weight, singles + parts, **options)


@every_level
@every_format
def test_bias_residual_gate_and_output_dtype(level, name):
    rng = np.random.default_rng(4)
    x = normal(rng, 9, 300)
    weight = LinearWeight.pack([normal(rng, 77, 300)], **FORMATS[name])
    bias, residual = normal(rng, 77), normal(rng, 9, 77)
    plain = kernels.linear(level, x, weight)
    biased = kernels.linear(level, x, weight, bias=bias)
    assert np.array_equal(biased, plain + bias)
    added = kernels.linear(level, x, weight, bias=bias, residual=residual)
    assert np.array_equal(added, residual + biased)
    halves = kernels.linear(level, x, weight, bias=bias, out_dtype="bf16")
    assert np.array_equal(halves, to_bf16(biased))

    parts = [normal(rng, 40, 300) for _ in range(2)]
    gate, up = (
        kernels.linear(level, x, LinearWeight.pack([part], **FORMATS[name])) for part in parts
    )
    weight = LinearWeight.pack(parts, gated=True, **FORMATS[name])
    gated = kernels.linear(level, x, weight, activation="silu")
    assert np.allclose(gated, gate / (1 + np.exp(-gate)) * up, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "most"), [("int8", 0.0085), ("int4", 0.105), ("int4-32", 0.085)])
def test_error_of_normal_weights(name, most):
    """Relative to the weights; the nearest int4 codes of plain scales err by 0.115 (128) or so."""
    w = normal(np.random.default_rng(5), 64, 2048)
    for source in (w, to_bf16(w), w.astype(np.float16)):
        unpacked = LinearWeight.pack([source], **FORMATS[name]).unpack()
        exact = as_float(source)
        assert np.sqrt(np.mean((unpacked - exact) ** 2) / np.mean(exact**2)) <= most


@every_format
def test_search_is_no_worse_than_plain_scales(name):
    """Per group, with an outlier in some."""
    rng = np.random.default_rng(6)
    w = normal(rng, 32, 1024)
    w[rng.random(w.shape) < 0.002] *= 20
    weight = LinearWeight.pack([w], **FORMATS[name])
    group = weight.group_size or 1024
    levels = 7 if weight.group_size else 127
    groups = w.reshape(32, -1, group)
    scale = np.abs(groups).max(axis=2, keepdims=True) / levels
    plain = np.round(groups / scale) * scale
    unpacked = weight.unpack().reshape(groups.shape)

    def error(values):
        return ((values - groups) ** 2).sum(axis=2)

    assert np.all(error(unpacked) <= 1.3 * error(plain))
    assert error(unpacked).sum() < error(plain).sum()


@every_format
def test_weights_of_no_size_and_those_not_finite(name):
    w = np.ones((20, 200), np.float32)
    w[1], w[2], w[3, 5], w[4, 9] = 0, 1e-38, np.nan, np.inf
    unpacked = LinearWeight.pack([w], **FORMATS[name]).unpack()
    assert not unpacked[1:3].any()
    group = FORMATS[name].get("group_size", 200)
    assert np.isnan(unpacked[3:5, :group]).all()
    assert np.allclose(unpacked[[0, *range(5, 20)]], 1, rtol=1e-3)


def test_sizes():
    """One scale per output, or two fp16 words per output and group."""
    w = [np.zeros((32, 256), np.float32)]
    assert LinearWeight.pack(w, format="int8").num_bytes == 32 * (256 + 4)
    assert LinearWeight.pack(w, format="int4", group_size=128).num_bytes == 32 * (128 + 2 * 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "int4"}, "group size of int4 weights is 32, 64 or 128, not 0"),
        ({"format": "int4", "group_size": 48}, "not 48"),
        ({"format": "int8", "group_size": 32}, "int8 weights have no groups"),
        ({"format": "fp16"}, "fp32 can't become fp16"),
    ],
)
def test_formats_that_do_not_exist(options, message):
    with pytest.raises(_native.NativeError, match=message):
        LinearWeight.pack([np.zeros((2, 2), np.float32)], **options)
