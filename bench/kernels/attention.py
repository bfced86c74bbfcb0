"""Attention alone: bytes of K and V per second when decoding, operations per second in prefill.

    python -m bench.kernels.attention --threads 1 --dtype bf16
    python -m bench.kernels.attention --heads 32/4x64 --contexts 16384 32768 --dtype int8

Times are medians; with one thread they are CPU time, so that kernels can be compared on a machine
that isn't quiet. Decoding goes through copies of the cache that exceed the CPU's caches; ``read``
is its share of the rate at which the same threads read memory in the same seconds. A causal prefill
counts the products that it needs, half of the square, so the share lost on the diagonal shows.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lmi_core import _native

BLOCK_SIZE = 32
STREAM_BYTES = 160 << 20
READ_BYTES = 128 << 20
_ELEMENT_BYTES = {"bf16": 2, "fp32": 4, "int8": 1}


class Shape(NamedTuple):
    num_q_heads: int
    num_kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.num_q_heads}/{self.num_kv_heads}x{self.head_dim}"

    def token_bytes(self, dtype: str) -> int:
        """Of a token's K and V; of int8 with their scales."""
        head_bytes = self.head_dim * _ELEMENT_BYTES[dtype] + (4 if dtype == "int8" else 0)
        return 2 * self.num_kv_heads * head_bytes


class Case(NamedTuple):
    shape: Shape
    num_seqs: int
    start: int
    count: int


SHAPES = [Shape(14, 2, 64), Shape(32, 4, 64), Shape(32, 8, 128), Shape(12, 12, 64)]


def cases(shapes: Sequence[Shape], contexts: Sequence[int]) -> Iterator[Case]:
    """One sequence that decodes at each of the contexts, or what there is of any kind."""
    for shape in shapes:
        yield from (Case(shape, 1, context - 1, 1) for context in contexts)
        if contexts:
            continue
        for num_seqs, length in [(1, 512), (1, 8192), (32, 192), (16, 1024)]:
            yield Case(shape, num_seqs, length - 1, 1)
        for start, count in [(0, 512), (0, 2048), (3584, 512)]:
            yield Case(shape, 1, start, count)


def measure(case: Case, level: str, dtype: str, num_threads: int, num_repeats: int) -> float:
    """Median of the seconds of one layer."""
    shape = case.shape
    length = case.start + case.count
    max_blocks = -(-length // BLOCK_SIZE)
    num_blocks = case.num_seqs * max_blocks
    rng = np.random.default_rng(0)
    block_bytes = _native.KvCache.block_bytes(
        num_layers=1,
        block_size=BLOCK_SIZE,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=dtype,
    )
    num_layers = 1
    if case.count == 1:  # the layers of a model exceed the caches together
        num_layers = max(1, STREAM_BYTES // (num_blocks * block_bytes))
    cache = _native.paged_kernels.Cache(
        num_layers=num_layers,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=dtype,
    )
    # Bytes of small positive numbers in either format.
    cache.memory.view(np.uint16)[:] = rng.integers(0x3C00, 0x3F80, cache.memory.size // 2)
    tables = rng.permutation(num_blocks).astype(np.int32).reshape(case.num_seqs, max_blocks)
    step = _native.paged_kernels.Step(tables, block_size=BLOCK_SIZE)
    for seq in range(case.num_seqs):
        step.add(table_row=seq, start=case.start, count=case.count)
    width = shape.num_q_heads * shape.head_dim
    q = rng.standard_normal((case.num_seqs * case.count, width), np.float32)
    y_dtype = "fp32" if dtype == "fp32" else "bf16"
    if y_dtype == "bf16":
        q = (q.view(np.uint32) >> 16).astype(np.uint16)
    runner = _native.paged_kernels.Runner(level, num_threads=num_threads, stride=0)

    def run(layer: int) -> float:
        runner.attention(
            q,
            cache,
            step,
            layer=layer,
            num_q_heads=shape.num_q_heads,
            scale=shape.head_dim**-0.5,
            y_dtype=y_dtype,
        )
        return float(runner.seconds)

    return statistics.median(
        sum(run(layer) for layer in range(num_layers)) / num_layers for _ in range(num_repeats)
    )


def describe(case: Case, dtype: str, seconds: float, read_s: float) -> str:
    shape = case.shape
    length = case.start + case.count
    kv_bytes = case.num_seqs * length * shape.token_bytes(dtype)
    keys_seen = case.count * (case.start + (case.count + 1) / 2)
    operations = 4 * case.num_seqs * keys_seen * shape.num_q_heads * shape.head_dim
    kind = "decode" if case.count == 1 else "prefill"
    share = kv_bytes / seconds / (READ_BYTES / read_s)
    return (
        f"{kind:8} {shape!s:>10} {case.num_seqs:5} {length:7} {case.count:6} "
        f"{seconds * 1e6:10.1f} {kv_bytes / seconds / 1e9:8.1f} {operations / seconds / 1e9:8.1f}"
        f" {share:5.0%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instruction-set", default=_native.instruction_sets()[-1])
    parser.add_argument("--dtype", choices=list(_ELEMENT_BYTES), default="bf16")
    parser.add_argument("--threads", type=int, default=_native.num_physical_cores())
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--heads", choices=[str(shape) for shape in SHAPES], nargs="+")
    parser.add_argument("--contexts", type=int, nargs="*", default=[])
    args = parser.parse_args()
    print(f"attention, {args.instruction_set}, {args.dtype}, {args.threads} threads")
    print("kind          heads  seqs  tokens   rows         us     GB/s  GFLOP/s  read")
    shapes = [shape for shape in SHAPES if not args.heads or str(shape) in args.heads]
    for case in cases(shapes, args.contexts):
        seconds = measure(case, args.instruction_set, args.dtype, args.threads, args.repeats)
        read = _native.kernels.time_read(args.instruction_set, READ_BYTES, args.threads, 5)
        print(describe(case, args.dtype, seconds, min(read)), flush=True)


if __name__ == "__main__":
    main()
