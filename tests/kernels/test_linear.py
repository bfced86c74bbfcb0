"""The linear kernel of every instruction set against numpy in double precision."""

import numpy as np
import pytest

from lmi_core import _native
from tests.kernels.bf16 import as_float, to_bf16

kernels = _native.kernels
LinearWeight = _native.LinearWeight
LEVELS = _native.instruction_sets()
pytestmark = pytest.mark.parametrize("level", LEVELS)


def make_matrix(rng, rows, columns, dtype):
    x = rng.standard_normal((rows, columns), dtype=np.float32)
    return x if dtype == "fp32" else to_bf16(x)


def tolerance(x, w):
    """What a chain of K float additions may lose, by output."""
    return 2e-6 * np.sqrt(x.shape[1]) * (np.abs(as_float(x)) @ np.abs(as_float(w)).T) + 1e-6


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("num_inputs", [1, 2, 7, 64, 255, 513, 1100])
@pytest.mark.parametrize("num_outputs", [1, 16, 23, 64, 65, 130])
def test_matches_reference(level, dtype, num_inputs, num_outputs):
    rng = np.random.default_rng(num_inputs * 1000 + num_outputs)
    w = make_matrix(rng, num_outputs, num_inputs, dtype)
    weight = LinearWeight.pack([w], format=dtype)
    for num_rows in (1, 2, 3, 4, 5, 6, 7, 12, 13, 31, 67):
        x = make_matrix(rng, num_rows, num_inputs, dtype)
        y = kernels.linear(level, x, weight)
        assert np.all(np.abs(y - as_float(x) @ as_float(w).T) <= tolerance(x, w))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_bias_residual_and_output_dtype(level, dtype):
    rng = np.random.default_rng(1)
    w, x = make_matrix(rng, 77, 300, dtype), make_matrix(rng, 9, 300, dtype)
    bias = rng.standard_normal(77, dtype=np.float32)
    residual = rng.standard_normal((9, 77), dtype=np.float32)
    weight = LinearWeight.pack([w], format=dtype)
    reference = as_float(x) @ as_float(w).T
    plain = kernels.linear(level, x, weight)
    biased = kernels.linear(level, x, weight, bias=bias)
    assert np.array_equal(biased, plain + bias)
    added = kernels.linear(level, x, weight, bias=bias, residual=residual)
    assert np.array_equal(added, residual + biased)
    halves = kernels.linear(level, x, weight, bias=bias, out_dtype="bf16")
    assert halves.dtype == np.uint16
    assert np.array_equal(halves, to_bf16(biased))
    assert np.all(np.abs(added - (reference + bias + residual)) <= tolerance(x, w) + 1e-5)


def silu(x):
    return x / (1 + np.exp(-x))


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("activation", [silu, gelu_tanh])
@pytest.mark.parametrize("num_columns", [5, 16, 40, 100])
def test_gated(level, dtype, activation, num_columns):
    rng = np.random.default_rng(num_columns)
    gate, up = (make_matrix(rng, num_columns, 129, dtype) for _ in range(2))
    bias = rng.standard_normal(2 * num_columns, dtype=np.float32)
    weight = LinearWeight.pack([gate, up], format=dtype, gated=True)
    for num_rows in (1, 6, 20):
        x = make_matrix(rng, num_rows, 129, dtype)
        y = kernels.linear(level, x, weight, bias=bias, activation=activation.__name__)
        assert y.shape == (num_rows, num_columns)
        gate_value = as_float(x) @ as_float(gate).T + bias[:num_columns]
        up_value = as_float(x) @ as_float(up).T + bias[num_columns:]
        reference = activation(gate_value) * up_value
        assert np.allclose(y, reference, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activation_saturates_cleanly(level, activation):
    """exp neither overflows into NaN nor loses the identity for large inputs."""
    x = np.array([[-300.0], [-90.0], [-20.0], [0.0], [20.0], [300.0]], np.float32)
    weight = LinearWeight.pack([np.ones((1, 1), np.float32)] * 2, format="fp32", gated=True)
    y = kernels.linear(level, x, weight, activation=activation)[:, 0]
    assert np.all(np.isfinite(y))
    assert np.allclose(y, [0, 0, 0, 0, 400, 90000], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("gated", [False, True])
def test_same_bits_whatever_the_batch(level, dtype, gated):
    """A row's result depends on neither row count nor partition, order or thread count."""
    rng = np.random.default_rng(3)
    parts = [make_matrix(rng, 180, 1027, dtype) for _ in range(2)]
    weight = LinearWeight.pack(parts, format=dtype, gated=gated)
    options = {"activation": "silu"} if gated else {}
    x = make_matrix(rng, 530, 1027, dtype)
    alone = np.concatenate(
        [kernels.linear(level, x[i : i + 1], weight, **options) for i in range(70)]
    )
    everything = kernels.linear(level, x, weight, **options)
    assert np.array_equal(everything[:70], alone)
    for num_rows in (2, 3, 5, 6, 7, 11, 32, 67, 95, 96, 97, 200):
        for num_threads, stride in ((1, 1), (2, 7), (8, 3), (64, 5)):
            y = kernels.linear(
                level, x[:num_rows], weight, num_threads=num_threads, stride=stride, **options
            )
            assert np.array_equal(y, everything[:num_rows])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_rows_apart_and_no_rows(level, dtype):
    """x may be a slice of wider rows, at any offset; zero rows are no work."""
    rng = np.random.default_rng(4)
    weight = LinearWeight.pack([make_matrix(rng, 33, 31, dtype)], format=dtype)
    wide = make_matrix(rng, 8, 77, dtype)
    y = kernels.linear(level, wide[:, 5:36], weight)
    assert np.array_equal(y, kernels.linear(level, wide[:, 5:36].copy(), weight))
    assert kernels.linear(level, wide[:0, :31], weight).shape == (0, 33)


def test_nan_stays_in_its_row_and_output(level):
    """Padding never meets another row's or output's values."""
    rng = np.random.default_rng(5)
    w, x = make_matrix(rng, 19, 33, "bf16"), make_matrix(rng, 7, 33, "bf16")
    w[4, 32] = x[2, 32] = 0x7FC0
    y = kernels.linear(level, x, LinearWeight.pack([w], format="bf16"))
    expected = np.zeros((7, 19), bool)
    expected[2, :] = expected[:, 4] = True
    assert np.array_equal(np.isnan(y), expected)
