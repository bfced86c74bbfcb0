"""Rotation, norms of heads and the write to the cache, against a plain reference at every level."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lmi_core import _native
from tests.kernels.paged import (
    FLOAT_BYTES,
    VECTORS,
    CacheShape,
    as_float,
    from_float_bytes,
    numbers_of_bytes,
    quantize_rows,
    to_bf16,
    to_float_bytes,
)

Runner = _native.paged_kernels.Runner
Step = _native.paged_kernels.Step

EPS = 1e-5


def tables(rotary_dim: int, num_positions: int = 128) -> tuple[np.ndarray, np.ndarray]:
    angle = np.arange(num_positions)[:, None] * 10000.0 ** -np.linspace(0, 1, rotary_dim // 2)
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def reference_heads(
    x: npt.NDArray[np.float32],
    cos: npt.NDArray[np.float32],
    sin: npt.NDArray[np.float32],
    weight: npt.NDArray[np.float32] | None,
) -> npt.NDArray[np.float64]:
    """x [rows, heads, d]; cos, sin [rows, rotary / 2]."""
    y = x.astype(np.float64)
    if weight is not None:
        y = y / np.sqrt((y**2).mean(-1, keepdims=True) + EPS) * weight
    half = cos.shape[1]
    c, s = cos[:, None].astype(np.float64), sin[:, None].astype(np.float64)
    first, second = y[..., :half].copy(), y[..., half : 2 * half].copy()
    y[..., :half] = first * c - second * s
    y[..., half : 2 * half] = second * c + first * s
    return y


class Case:
    def __init__(self, *, num_q_heads: int, rotary_dim: int, norm: bool, **shape: Any) -> None:
        rng = np.random.default_rng(1)
        self.num_q_heads = num_q_heads
        self.cache = CacheShape(num_blocks=8, num_layers=2, **shape)
        head_dim = self.cache.head_dim
        self.table = np.array([[5, 2, 7], [0, 3, 1]], np.int32)
        self.cos, self.sin = tables(rotary_dim)
        self.q_norm = rng.random(head_dim, np.float32) + 0.5 if norm else None
        self.k_norm = rng.random(head_dim, np.float32) + 0.5 if norm else None
        self.heads = num_q_heads + 2 * self.cache.num_kv_heads
        length = 3 * self.cache.block_size
        self.qkv = rng.standard_normal((2, length, self.heads * head_dim), np.float32)

    def run(self, runner: Any, rows: list[tuple[int, int, int]], q_dtype: str = "fp32") -> Any:
        step = Step(self.table, block_size=self.cache.block_size)
        for seq, start, count in rows:
            step.add(table_row=seq, start=start, count=count)
        qkv = np.concatenate([self.qkv[seq, start : start + count] for seq, start, count in rows])
        return runner.rope_cache_write(
            qkv,
            self.cache.native,
            step,
            layer=1,
            num_q_heads=self.num_q_heads,
            cos=self.cos,
            sin=self.sin,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            norm_eps=EPS,
            q_dtype=q_dtype,
        )

    def expected(self, seq: int, positions: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        c = self.cache
        x = self.qkv[seq, positions].reshape(-1, self.heads, c.head_dim)
        q, k, v = np.split(x, [self.num_q_heads, self.num_q_heads + c.num_kv_heads], axis=1)
        cos, sin = self.cos[positions], self.sin[positions]
        return (
            reference_heads(q, cos, sin, self.q_norm),
            reference_heads(k, cos, sin, self.k_norm),
            v,
        )


SHAPES = [
    {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "rotary_dim": 64, "block_size": 16},
    {"num_q_heads": 3, "num_kv_heads": 1, "head_dim": 80, "rotary_dim": 20, "block_size": 32},
    {"num_q_heads": 2, "num_kv_heads": 2, "head_dim": 10, "rotary_dim": 10, "block_size": 16},
]


@pytest.mark.parametrize("level", VECTORS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8", "e4m3", "e5m2"])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_reference(level: str, dtype: str, norm: bool, shape: dict[str, int]) -> None:
    case = Case(norm=norm, dtype=dtype, **shape)
    before_k, before_v = case.cache.keys(), case.cache.values()
    rows = [(0, 0, 5), (1, 17, 9)]
    q = case.run(Runner(level, num_threads=3, stride=5), rows)
    q0, k0, v0 = case.expected(0, np.arange(0, 5))
    q1, k1, v1 = case.expected(1, np.arange(17, 26))
    expected_q = np.concatenate([q0, q1]).reshape(14, -1)
    np.testing.assert_allclose(q, expected_q, atol=1e-5, rtol=1e-5)

    expected_k, expected_v = as_float(before_k), as_float(before_v)
    block_size = case.cache.block_size
    for seq, start, k, v in [(0, 0, k0, v0), (1, 17, k1, v1)]:
        for i in range(len(k)):
            block = case.table[seq, (start + i) // block_size]
            expected_k[1, block, :, (start + i) % block_size] = k[i]
            expected_v[1, block, :, (start + i) % block_size] = v[i]
    # int8: half a step of the largest value, which may be 5
    tolerance = {"fp32": 1e-5, "bf16": 8e-3, "int8": 2.5e-2, "e4m3": 2**-4, "e5m2": 2**-3}[dtype]
    keys, values = as_float(case.cache.keys()), as_float(case.cache.values())
    np.testing.assert_allclose(keys, expected_k, atol=min(tolerance, 2.5e-2), rtol=tolerance)
    if dtype in FLOAT_BYTES:
        codes = to_float_bytes(expected_v / case.cache.fixed(1), dtype)
        exact = from_float_bytes(codes, dtype) * case.cache.fixed(1)
        np.testing.assert_array_equal(values, exact)
    elif dtype == "int8":
        codes, scale = quantize_rows(expected_v)
        np.testing.assert_array_equal(values, codes * scale)
    else:
        exact_v = expected_v if dtype == "fp32" else as_float(to_bf16(expected_v))
        np.testing.assert_array_equal(values, exact_v)


@pytest.mark.parametrize("level", VECTORS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8", "e4m3", "e5m2"])
@pytest.mark.parametrize("num_threads", [1, 2, 7])
def test_chunking_does_not_change_the_cache(level: str, dtype: str, num_threads: int) -> None:
    shape = {"num_q_heads": 2, "num_kv_heads": 2, "head_dim": 24, "rotary_dim": 24}
    whole = Case(norm=True, dtype=dtype, **shape)
    q = whole.run(Runner(level), [(0, 0, 45)])
    pieces = Case(norm=True, dtype=dtype, **shape)
    is_wide = dtype in ("fp32", "bf16")
    pieces.cache.raw[:] = 0x3F80 if is_wide else 0x55  # stale memory of blocks used before
    cuts = [0, 1, 2, 4, 5, 8, 30, 31, 45]
    for stride, (start, end) in enumerate(itertools.pairwise(cuts)):
        runner = Runner(level, num_threads=num_threads, stride=stride)
        y = pieces.run(runner, [(1, start, 3), (0, start, end - start)])
        np.testing.assert_array_equal(y[3:], q[start:end])
    for array, expected in [
        (pieces.cache.keys(), whole.cache.keys()),
        (pieces.cache.values(), whole.cache.values()),
    ]:
        for position in range(45):
            block, offset = whole.table[0, position // 16], position % 16
            np.testing.assert_array_equal(array[1, block, :, offset], expected[1, block, :, offset])


@pytest.mark.parametrize("level", VECTORS)
def test_even_tokens_clear_their_neighbour(level: str) -> None:
    case = Case(num_q_heads=1, num_kv_heads=1, head_dim=16, rotary_dim=16, norm=False, dtype="bf16")
    case.cache.raw[:] = 0x7FC0  # NaN
    case.run(Runner(level), [(0, 0, 5)])
    values = as_float(case.cache.values())[1, case.table[0, 0], 0]
    assert np.isfinite(values[:6]).all()
    assert (values[5] == 0).all()
    case.run(Runner(level), [(0, 5, 1)])
    after = as_float(case.cache.values())[1, case.table[0, 0], 0]
    np.testing.assert_array_equal(after[:5], values[:5])
    assert (after[5] != 0).all()


@pytest.mark.parametrize("level", VECTORS)
def test_even_tokens_clear_their_neighbours_codes(level: str) -> None:
    case = Case(num_q_heads=1, num_kv_heads=1, head_dim=16, rotary_dim=16, norm=False, dtype="int8")
    case.cache.raw[:] = 0x55
    case.run(Runner(level), [(0, 0, 5)])
    first = case.cache.values()[1, case.table[0, 0], 0]
    assert (first[5] == 0).all()
    case.run(Runner(level), [(0, 5, 1)])
    after = case.cache.values()[1, case.table[0, 0], 0]
    np.testing.assert_array_equal(after[:5], first[:5])
    assert (after[5] != 0).any()


@pytest.mark.parametrize("level", VECTORS)
def test_what_is_not_finite_stays_so(level: str) -> None:
    shape = {"num_q_heads": 1, "num_kv_heads": 1, "head_dim": 16, "rotary_dim": 16}
    case = Case(norm=False, dtype="int8", **shape)
    case.qkv[0, 3, -1] = np.inf
    case.run(Runner(level), [(0, 0, 5)])
    values = case.cache.values()[1, case.table[0, 0], 0]
    assert np.isnan(values[3]).all()
    assert np.isfinite(values[[0, 1, 2, 4]]).all()


@pytest.mark.parametrize("level", VECTORS)
@pytest.mark.parametrize("dtype", FLOAT_BYTES)
def test_floats_become_the_nearest_of_a_byte(level: str, dtype: str) -> None:
    """Ties to even, and the largest one where they are larger; NaN stays what it is."""
    shape = {"num_q_heads": 1, "num_kv_heads": 1, "head_dim": 512, "rotary_dim": 16}
    case = Case(norm=False, dtype=dtype, **shape)
    scale = case.cache.fixed_scales[1, 1]
    numbers = numbers_of_bytes(dtype)
    near = np.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2, numbers * 1.01])
    near = np.concatenate([near, -near, [np.inf, -np.inf, np.nan]])[:512]
    case.qkv[0, 3, -512:] = np.resize(near, 512).astype(np.float32) * scale
    case.run(Runner(level), [(0, 0, 5)])
    values = case.cache.values()[1, case.table[0, 0], 0, 3]
    codes = to_float_bytes(case.qkv[0, 3, -512:] / scale, dtype)
    np.testing.assert_array_equal(values, from_float_bytes(codes, dtype) * scale)


@pytest.mark.parametrize("level", VECTORS)
def test_bf16_queries_are_rounded(level: str) -> None:
    case = Case(num_q_heads=3, num_kv_heads=1, head_dim=10, rotary_dim=4, norm=True, dtype="bf16")
    q = case.run(Runner(level), [(0, 0, 9)])
    halves = case.run(Runner(level), [(0, 0, 9)], q_dtype="bf16")
    np.testing.assert_array_equal(halves, to_bf16(q))


@pytest.mark.parametrize("level", VECTORS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8", "e4m3", "e5m2"])
def test_block_copy_takes_every_layer(level: str, dtype: str) -> None:
    cache = CacheShape(num_layers=3, num_blocks=6, head_dim=8, dtype=dtype)
    rng = np.random.default_rng(0)
    cache.raw[:] = rng.integers(0, 100, cache.raw.shape)
    expected = cache.raw.copy()
    expected[:, 4] = expected[:, 1]
    expected[:, 0] = expected[:, 5]
    runner = Runner(level, num_threads=2, stride=0)
    runner.block_copy(cache.native, np.array([1, 5]), np.array([4, 0]))
    np.testing.assert_array_equal(cache.raw, expected)
