"""Embedding, norms, activations and row gathering of every vector layer against numpy."""

import math

import numpy as np
import pytest

from lmi_core import _native
from tests.kernels.bf16 import as_float, from_bf16, to_bf16
from tests.kernels.paged import VECTORS

kernels = _native.kernels
LinearWeight = _native.LinearWeight
pytestmark = pytest.mark.parametrize("level", VECTORS)
COLUMNS = [1, 15, 16, 17, 64, 100, 768, 2049]


@pytest.mark.parametrize("num_columns", COLUMNS)
def test_rms_norm(level, num_columns):
    rng = np.random.default_rng(num_columns)
    x = rng.standard_normal((19, num_columns), dtype=np.float32) * 3
    weight = rng.standard_normal(num_columns, dtype=np.float32)
    y = kernels.norm(level, x, weight, eps=1e-5)
    wide = x.astype(np.float64)
    reference = wide / np.sqrt(np.mean(wide**2, axis=1, keepdims=True) + 1e-5) * weight
    assert np.allclose(y, reference, rtol=1e-6, atol=1e-7)
    halves = kernels.norm(level, x, weight, eps=1e-5, out_dtype="bf16")
    assert np.array_equal(halves, to_bf16(y))


def test_rms_norm_rows_are_independent(level):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((300, 200), dtype=np.float32)
    weight = np.ones(200, np.float32)
    together = kernels.norm(level, x, weight, eps=1e-6, num_threads=3)
    alone = [kernels.norm(level, x[i : i + 1], weight, eps=1e-6)[0] for i in range(300)]
    assert np.array_equal(together, alone)


@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize("kind", ["none", "rms", "layer"])
@pytest.mark.parametrize("num_columns", COLUMNS)
def test_norms_of_every_kind(level, num_columns, kind, num_groups):
    rng = np.random.default_rng(num_columns)
    x = rng.standard_normal((7, num_groups * num_columns), dtype=np.float32) * 3 + 5
    weight, bias = rng.standard_normal((2, num_groups * num_columns), dtype=np.float32)
    options = {"eps": 1e-5, "kind": kind, "num_groups": num_groups}
    wide = x.astype(np.float64).reshape(7, num_groups, num_columns)
    if kind == "layer":
        wide = wide - wide.mean(-1, keepdims=True)
    if kind != "none":
        wide = wide / np.sqrt(np.mean(wide**2, -1, keepdims=True) + 1e-5)
    wide = wide.reshape(x.shape)
    y = kernels.norm(level, x, weight, bias, num_threads=3, **options)
    assert np.allclose(y, wide * weight + bias, rtol=1e-5, atol=1e-5)
    assert np.allclose(kernels.norm(level, x, **options), wide, rtol=1e-5, atol=1e-6)
    alone = [kernels.norm(level, x[i : i + 1], weight, bias, **options)[0] for i in range(7)]
    assert np.array_equal(y, alone)


def test_a_layer_norm_of_a_large_mean(level):
    """The mean is taken out before squares are summed."""
    x = np.random.default_rng(0).standard_normal((3, 500), dtype=np.float32) + 3000
    wide = x.astype(np.float64)
    wide = (wide - wide.mean(-1, keepdims=True)) / wide.std(-1, keepdims=True)
    assert np.allclose(kernels.norm(level, x, eps=0, kind="layer"), wide, atol=5e-4)


def gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu": gelu,
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
}


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("num_columns", [1, 17, 5000])
def test_activations(level, activation, gated, num_columns):
    rng = np.random.default_rng(num_columns)
    x = rng.standard_normal((5, num_columns * (2 if gated else 1)), dtype=np.float32) * 3
    wide = x.astype(np.float64)
    exact = ACTIVATIONS[activation](wide[:, :num_columns])
    exact = exact * wide[:, num_columns:] if gated else exact
    y = kernels.activation(level, x, activation, gated=gated, num_threads=3)
    assert np.allclose(y, exact, rtol=2e-6, atol=2e-5 if gated else 3e-6)
    alone = [kernels.activation(level, x[i : i + 1], activation, gated=gated)[0] for i in range(5)]
    assert np.array_equal(y, alone)


def test_soft_caps(level):
    x = np.linspace(-300, 300, 4099, dtype=np.float32).reshape(1, -1)
    y = kernels.activation(level, x, gated=False, cap=30.0)
    assert np.allclose(y, 30 * np.tanh(x.astype(np.float64) / 30), atol=1e-5)


def test_clips(level):
    x = np.linspace(-9, 9, 4099, dtype=np.float32).reshape(1, -1)
    y = kernels.activation(level, x, "clip", gated=False, cap=8.0)
    assert np.array_equal(y, np.clip(x, -8, 8))


@pytest.mark.parametrize("num_columns", COLUMNS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_embed(level, num_columns, dtype):
    rng = np.random.default_rng(num_columns)
    table = rng.standard_normal((50, num_columns), dtype=np.float32)
    table = {"fp32": table, "bf16": to_bf16(table), "fp16": table.astype(np.float16)}[dtype]
    token_ids = rng.integers(0, 50, 150).astype(np.int32)
    y = kernels.embed(level, token_ids, table, scale=1.5)
    assert np.array_equal(y, (as_float(table)[token_ids] * 1.5).astype(np.float32))


def test_gather_rows(level):
    x = np.random.default_rng(0).standard_normal((40, 33), dtype=np.float32)
    rows = np.array([3, 3, 39, 0], np.int32)
    assert np.array_equal(kernels.gather_rows(level, x, rows), x[rows])


def test_bf16_rounding_of_every_kind(level):
    """Ties, subnormals, overflow, infinities and NaN, through a kernel that stores bf16."""
    bits = np.random.default_rng(1).integers(0, 2**32, 4096, dtype=np.uint32)
    bits[:4] = 0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x00008000
    x = bits.view(np.float32)
    x = x[np.isfinite(x)].reshape(1, -1)
    weight = LinearWeight.pack([np.ones((1, 1), np.float32)], format="fp32")
    y = kernels.linear(level, x.T.copy(), weight, out_dtype="bf16")[:, 0]
    assert np.array_equal(from_bf16(y), from_bf16(to_bf16(x[0])))
