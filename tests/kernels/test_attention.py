"""Attention over the paged cache, against a plain reference at every level."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lmi_core import _native
from tests.kernels.paged import (
    FLOAT_LEVELS,
    KEY_GROUP,
    CacheShape,
    as_float,
    from_float_bytes,
    reference_attention,
    to_bf16,
)

Runner = _native.paged_kernels.Runner
Step = _native.paged_kernels.Step

TOLERANCE = {"fp32": 1e-5, "bf16": 1.2e-2, "int8": 1.2e-2, "e4m3": 1.2e-2}
DTYPES = list(TOLERANCE)


class Context:
    """A cache filled at random and sequences whose blocks lie scattered in it."""

    def __init__(
        self, lengths: list[int], *, num_q_heads: int, seed: int = 0, **shape: Any
    ) -> None:
        rng = np.random.default_rng(seed)
        block_size = shape.get("block_size", 16)
        max_blocks = max(-(-length // block_size) for length in lengths)
        num_blocks = len(lengths) * max_blocks + 1
        self.cache = CacheShape(num_blocks=num_blocks, **shape)
        self.lengths = lengths
        self.num_q_heads = num_q_heads
        c = self.cache
        full = (c.num_layers, num_blocks, c.num_kv_heads, c.block_size, c.head_dim)
        c.write(rng.standard_normal(full, np.float32), rng.standard_normal(full, np.float32))
        ids = rng.permutation(num_blocks - 1).astype(np.int32)
        self.tables = ids.reshape(len(lengths), max_blocks)
        self.layer = c.num_layers - 1
        self.scale = c.head_dim**-0.5
        width = num_q_heads * c.head_dim
        self.q = [rng.standard_normal((n, width), np.float32) * 2 for n in lengths]
        if c.dtype == "bf16":
            self.q = [to_bf16(q) for q in self.q]

    def kv(self, seq: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        result = []
        for array in (self.cache.keys(), self.cache.values()):
            blocks = as_float(array[self.layer][self.tables[seq]])  # blocks, heads, block, dim
            tokens = np.moveaxis(blocks, 1, 2).reshape(
                -1, self.cache.num_kv_heads, self.cache.head_dim
            )
            result.append(tokens[: self.lengths[seq]])
        return result[0], result[1]

    def run(
        self, runner: Any, rows: list[tuple[int, int, int]], **options: Any
    ) -> list[npt.NDArray[np.generic]]:
        """rows: (sequence, start, count), one step; results per entry."""
        step = Step(self.tables, block_size=self.cache.block_size)
        for seq, start, count in rows:
            step.add(table_row=seq, start=start, count=count)
        q = np.concatenate([self.q[seq][start : start + count] for seq, start, count in rows])
        y = runner.attention(
            q,
            self.cache.native,
            step,
            layer=self.layer,
            num_q_heads=self.num_q_heads,
            scale=self.scale,
            **options,
        )
        return np.split(y, np.cumsum([count for _, _, count in rows])[:-1])

    def reference(
        self, seq: int, start: int, count: int, **options: Any
    ) -> npt.NDArray[np.float64]:
        k, v = self.kv(seq)
        q = as_float(self.q[seq][start : start + count])
        q = q.reshape(count, self.num_q_heads, self.cache.head_dim)
        y = reference_attention(
            q, k[: start + count], v[: start + count], start=start, scale=self.scale, **options
        )
        return y.reshape(count, -1)


Span = tuple[int, int, int]
"""A sequence, where it starts, how many tokens."""


@functools.lru_cache(maxsize=1)
def with_reference(
    lengths: tuple[int, ...],
    spans: tuple[Span, ...],
    shape: tuple[tuple[str, Any], ...],
    options: tuple[tuple[str, Any], ...] = (),
) -> tuple[Context, list[npt.NDArray[np.float64]]]:
    """For all instruction levels, one after the other."""
    context = Context(list(lengths), **dict(shape))
    return context, [context.reference(*span, **dict(options)) for span in spans]


@pytest.mark.parametrize("level", FLOAT_LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "num_q_heads", "num_kv_heads", "block_size"),
    [
        (64, 14, 2, 16),
        (80, 4, 4, 32),
        (96, 3, 1, 16),
        (128, 8, 2, 48),
        (256, 2, 1, 16),
        (6, 5, 1, 16),
    ],
)
def test_matches_reference(
    level: str, dtype: str, head_dim: int, num_q_heads: int, num_kv_heads: int, block_size: int
) -> None:
    shape = {
        "num_q_heads": num_q_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "block_size": block_size,
        "num_layers": 2,
        "dtype": dtype,
    }
    rows = ((0, 0, 90), (1, 0, 1), (2, 529, 1), (3, 10, 7), (4, 220, 80))
    context, expected = with_reference((90, 1, 530, 17, 300), rows, tuple(shape.items()))
    results = context.run(Runner(level, num_threads=2, stride=7), list(rows))
    for wanted, y in zip(expected, results, strict=True):
        np.testing.assert_allclose(y, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("level", FLOAT_LEVELS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize(("head_dim", "num_q_heads"), [(72, 16), (40, 1), (6, 5), (14, 60)])
def test_keys_alone_give_the_bits_of_equal_values(
    level: str, dtype: str, head_dim: int, num_q_heads: int
) -> None:
    lengths, contexts = [300, 1, 533, 17], []
    for is_latent in (False, True):
        shape = {"num_kv_heads": 1, "head_dim": head_dim, "dtype": dtype, "is_latent": is_latent}
        context = Context(lengths, num_q_heads=num_q_heads, num_layers=2, **shape)
        cache = context.cache
        rows = np.random.default_rng(1).standard_normal(
            (2, cache.num_blocks, 1, cache.block_size, head_dim), np.float32
        )
        cache.write(rows, rows)
        contexts.append(context)
    assert 2 * contexts[1].cache.raw.size == contexts[0].cache.raw.size
    steps = [(0, 0, 300), (1, 0, 1), (2, 528, 5), (3, 10, 7)], [(0, 298, 1), (2, 532, 1)]
    for step in steps:
        both, alone = (each.run(Runner(level, num_threads=2, stride=3), step) for each in contexts)
        for wanted, y in zip(both, alone, strict=True):
            np.testing.assert_array_equal(y, wanted)


@pytest.mark.parametrize("level", FLOAT_LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_lies_behind_the_last_key_is_not_read(level: str, dtype: str) -> None:
    context = Context([37], num_q_heads=4, num_kv_heads=1, dtype=dtype, head_dim=16, is_latent=True)
    (wanted,) = context.run(Runner(level), [(0, 20, 17)])
    cache = context.cache
    block = int(context.tables[0][2])
    stored = cache.stored(0)[context.layer, block, 0].reshape(-1, KEY_GROUP, cache.step)
    stored[:, 5:] = np.frombuffer(b"\xff" * 4, stored.dtype)[0]  # NaN, where it isn't a code
    (y,) = context.run(Runner(level), [(0, 20, 17)])
    np.testing.assert_array_equal(y, wanted)


@pytest.mark.parametrize("level", FLOAT_LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("window", "soft_cap"), [(1, 0.0), (40, 0.0), (300, 0.0), (0, 5.0), (257, 3.0)]
)
def test_window_soft_cap_and_slopes(level: str, dtype: str, window: int, soft_cap: float) -> None:
    shape = (("num_q_heads", 4), ("dtype", dtype), ("head_dim", 32))
    slopes = (0.5, 0.01, 0.125, 0.003)
    options = {"window": window, "soft_cap": soft_cap, "slopes": slopes}
    spans = ((0, 0, 330), (0, 600, 100), (0, 699, 1))
    context, expected = with_reference((700,), spans, shape, tuple(options.items()))
    options["slopes"] = np.array(slopes, np.float32)
    for span, wanted in zip(spans, expected, strict=True):
        (y,) = context.run(Runner(level), [span], **options)
        np.testing.assert_allclose(y, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("level", FLOAT_LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim"), [(7, 1, 64), (4, 2, 20)])
def test_bits_do_not_depend_on_chunking(
    level: str, dtype: str, window: int, num_q_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    length = 601
    context = Context(
        [length, 350, 40],
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        seed=3,
    )
    rng = np.random.default_rng(5)
    slopes = rng.random(num_q_heads, np.float32) / 20 if window else None
    run = functools.partial(context.run, window=window, slopes=slopes)
    (alone,) = run(Runner(level), [(0, 0, length)])
    runners = [
        Runner(level, num_threads=t, stride=s) for t, s in [(1, 1), (2, 1), (5, 3), (64, 11)]
    ]
    runners.append(Runner(level, num_threads=2, stride=0))

    for runner in runners:
        start = 0
        while start < length:
            count = min(int(rng.choice([1, 2, 3, 15, 16, 17, 70, 300])), length - start)
            mates = [(1, int(rng.integers(0, 300)), 50), (2, 39, 1)]
            rows = [*mates[:1], (0, start, count), *mates[1:]]
            y = run(runner, rows)[1]
            np.testing.assert_array_equal(y, alone[start : start + count])
            start += count
    for start in [*range(20), 255, 256, 257, 511, 512, 513, 600]:
        (y,) = run(runners[start % 5], [(0, start, 1)])
        np.testing.assert_array_equal(y, alone[start : start + 1])


@pytest.mark.parametrize("level", FLOAT_LEVELS)
@pytest.mark.parametrize(
    ("num_threads", "num_q_heads", "num_kv_heads", "dtype"),
    [
        (1, 6, 3, "bf16"),
        (2, 16, 2, "bf16"),
        (2, 3, 3, "int8"),
        (8, 6, 3, "bf16"),
        (8, 14, 2, "int8"),
        (8, 9, 1, "fp32"),
    ],
)
def test_long_decode_is_cut_into_spans(
    level: str, num_threads: int, num_q_heads: int, num_kv_heads: int, dtype: str
) -> None:
    """Few query heads of a KV head (two, with AVX-512 eight): of all heads; more: of each."""
    context = Context(
        [3000, 900], num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=64, dtype=dtype
    )
    (alone, *_) = context.run(Runner(level), [(0, 2999, 1)])
    runner = Runner(level, num_threads=num_threads, stride=0)
    for _ in range(10):  # the spans' marks must be back at zero after every run
        y, _ = context.run(runner, [(0, 2999, 1), (1, 899, 1)])
        np.testing.assert_array_equal(y, alone)
    if num_threads > 1:
        assert runner.num_chunks > 2
    np.testing.assert_allclose(alone, context.reference(0, 2999, 1), atol=TOLERANCE[dtype])


@pytest.mark.parametrize("level", FLOAT_LEVELS)
def test_many_sequences(level: str) -> None:
    lengths = [1 + 37 * i % 400 for i in range(70)]
    context = Context(lengths, num_q_heads=2, num_kv_heads=1, head_dim=16)
    rows = [(seq, length - 1, 1) for seq, length in enumerate(lengths)]
    together = context.run(Runner(level, num_threads=2, stride=0), rows)
    for row, y in zip(rows, together, strict=True):
        (alone,) = context.run(Runner(level), [row])
        np.testing.assert_array_equal(y, alone)
        np.testing.assert_allclose(y, context.reference(*row), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("level", FLOAT_LEVELS)
@pytest.mark.parametrize(("q_dtype", "cache_dtype"), [("fp32", "bf16"), ("bf16", "fp32")])
def test_queries_of_another_dtype_are_converted(level: str, q_dtype: str, cache_dtype: str) -> None:
    context = Context([90], num_q_heads=2, num_kv_heads=2, head_dim=10, dtype=cache_dtype)
    rounded = as_float(to_bf16(as_float(context.q[0])))
    context.q[0] = to_bf16(rounded) if cache_dtype == "bf16" else rounded
    (expected,) = context.run(Runner(level), [(0, 0, 90)])
    context.q[0] = rounded if q_dtype == "fp32" else to_bf16(rounded)
    (y,) = context.run(Runner(level), [(0, 0, 90)])
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("level", FLOAT_LEVELS)
def test_bf16_outputs_are_the_rounded_floats(level: str) -> None:
    context = Context([50], num_q_heads=4, head_dim=24, dtype="bf16")
    (y,) = context.run(Runner(level), [(0, 0, 50)])
    (halves,) = context.run(Runner(level), [(0, 0, 50)], y_dtype="bf16")
    np.testing.assert_array_equal(halves, to_bf16(y))


@pytest.mark.parametrize("level", FLOAT_LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_unwritten_memory_does_not_matter(level: str, dtype: str) -> None:
    context = Context([45], num_q_heads=2, head_dim=16, dtype=dtype)
    (expected,) = context.run(Runner(level), [(0, 0, 45)])
    k, v = as_float(context.cache.keys()), as_float(context.cache.values())
    last = context.tables[0][2]
    k[:, last, :, 13:] = np.nan
    v[:, last, :, 14:] = np.nan  # the odd neighbour of token 44 was cleared when 44 was written
    v[:, last, :, 13] = 0.0
    if dtype == "fp32":
        v[:, last, :, 13] = np.nan
    context.cache.write(k, v)
    if dtype == "int8":  # of token 45, too: no code of it is left, but its scale may be anything
        scales = context.cache.scales(1)
        assert np.isnan(scales[0, last, :, 14:]).all()
    (y,) = context.run(Runner(level), [(0, 0, 45)])
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("level", FLOAT_LEVELS)
@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
@pytest.mark.parametrize("is_latent", [False, True])
def test_every_float_of_a_byte_is_widened_exactly(level: str, dtype: str, is_latent: bool) -> None:
    """A query that sees one token gets its values."""
    context = Context([1], num_q_heads=1, num_kv_heads=1, head_dim=256, dtype=dtype,
                      is_latent=is_latent)  # fmt: skip
    cache = context.cache
    codes = np.arange(256, dtype=np.uint8)
    numbers = from_float_bytes(codes, dtype)
    values = np.zeros((1, 2, 1, 16, 256), np.float32)
    values[...] = np.where(np.isfinite(numbers), numbers, 0) * cache.fixed(1)[0, 0]
    cache.write(values, values)
    context.q[0][:] = 0
    (y,) = context.run(Runner(level), [(0, 0, 1)])
    np.testing.assert_array_equal(y[0], values[0, 0, 0, 0])
    values[..., 7] = np.nan
    cache.write(values, values)
    (y,) = context.run(Runner(level), [(0, 0, 1)])
    assert np.isnan(y[0, 7])


@pytest.mark.parametrize("level", FLOAT_LEVELS)
def test_nan_shows(level: str) -> None:
    context = Context([20], num_q_heads=2, head_dim=16)
    context.q[0][7] = np.nan
    (y,) = context.run(Runner(level), [(0, 0, 20)])
    assert np.isnan(y[7]).all()
    assert np.isfinite(np.delete(y, 7, axis=0)).all()
