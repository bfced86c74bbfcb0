"""The linear kernel alone, against the machine's roofs measured in the same minute.

    python -m bench.kernels.linear --threads 2 --rows 1 8 512

A row is one weight of a model shape. Few rows stream copies of the weight that exceed the caches,
as the layers of a model do; the roof is the slower of reading the weight once and of the
multiply-adds. Times are medians, and the best in parentheses; a busy machine shows in the gap. With
one thread they are CPU time, so that kernels can be compared on a machine that isn't quiet.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bench.checkpoints import SHAPES, Shape
from lmi_core import _native
from lmi_core.ops.cpu import NativeWeights
from lmi_core.ops.operands import LinearWeight
from lmi_core.quantize.gguf.encode import ENCODERS, encode
from lmi_core.weights.block_matrix import BlockMatrix
from lmi_core.weights.float_code_matrix import CODE_VALUES
from lmi_core.weights.formats import BLOCK_FORMATS
from lmi_core.weights.matrix import Matrix

STREAM_BYTES = 160 << 20  # weights of one timed pass, well beyond any cache
READ_BYTES = 256 << 20
DTYPES = ["bf16", "fp32", "int8", "int4", *CODE_VALUES, *(kind.lower() for kind in ENCODERS)]
kernels = _native.kernels


@dataclass(frozen=True, slots=True)
class Linear:
    name: str
    num_outputs: int
    num_inputs: int
    gated: bool = False


@dataclass(frozen=True, slots=True)
class Roofs:
    read_gbs: float
    gflops: float


@dataclass(frozen=True, slots=True)
class Row:
    shape: str
    linear: str
    num_rows: int
    median_us: float
    best_us: float
    gflops: float
    gbs: float
    roof_us: float

    @property
    def share(self) -> float:
        return self.roof_us / self.median_us


def linears(shape: Shape) -> Iterator[Linear]:
    hidden, head_dim = shape.hidden_size, shape.head_dim
    qkv = (shape.num_heads + 2 * shape.num_kv_heads) * head_dim
    yield Linear("qkv", qkv, hidden)
    yield Linear("o", hidden, shape.num_heads * head_dim)
    yield Linear("gate_up", 2 * shape.intermediate_size, hidden, gated=True)
    yield Linear("down", hidden, shape.intermediate_size)
    yield Linear("lm_head", shape.vocab_size, hidden)


def random_parts(linear: Linear, dtype: str) -> Sequence[Matrix]:
    rng = np.random.default_rng(0)
    num_parts = 2 if linear.gated else 1
    shape = (linear.num_outputs // num_parts, linear.num_inputs)
    for kind in BLOCK_FORMATS:
        if kind != dtype:
            continue
        # A few rows again and again: making blocks takes long.
        blocks = encode(rng.standard_normal((64, linear.num_inputs), np.float32), kind.upper())
        rows = np.resize(blocks, (shape[0], blocks.shape[1]))
        return [BlockMatrix(kind, shape, rows)] * num_parts
    floats = rng.standard_normal((num_parts, *shape), np.float32) * np.float32(0.02)
    parts = floats if dtype == "fp32" else (floats.view(np.uint32) >> 16).astype(np.uint16)
    return list(parts)


def measure_roofs(level: str, dtype: str, num_threads: int) -> Roofs:
    dtype = "int8" if dtype in BLOCK_FORMATS or dtype in CODE_VALUES else dtype
    seconds = kernels.time_read(level, READ_BYTES, num_threads=num_threads, repeats=5)
    times, operations = kernels.time_multiply_add(
        level, dtype, num_steps=400_000 * num_threads, num_threads=num_threads, repeats=5
    )
    return Roofs(READ_BYTES / min(seconds) / 1e9, operations / min(times) / 1e9)


def measure(
    shape: str, linear: Linear, rows: list[int], args: argparse.Namespace
) -> Iterator[tuple[Row, Roofs]]:
    parts = random_parts(linear, args.dtype)
    backend = NativeWeights(num_threads=args.threads)

    def pack() -> LinearWeight:
        return backend.pack(parts, format=args.dtype, gated=linear.gated)

    weights = [pack()]
    weight_bytes = weights[0].num_bytes
    weights += [pack() for _ in range(STREAM_BYTES // weight_bytes - 1)]
    operations = 2 * linear.num_outputs * linear.num_inputs
    for num_rows in rows:
        used = weights if num_rows < 64 else weights[:2]
        roofs = measure_roofs(args.instruction_set, args.dtype, args.threads)
        seconds = kernels.time_linear(
            args.instruction_set,
            num_rows,
            used,
            num_threads=args.threads,
            repeats=args.repeats,
        )
        median = statistics.median(seconds) / len(used)
        reading = weight_bytes / (roofs.read_gbs * 1e9)
        computing = operations * num_rows / (roofs.gflops * 1e9)
        yield (
            Row(
                shape=shape,
                linear=linear.name,
                num_rows=num_rows,
                median_us=median * 1e6,
                best_us=min(seconds) / len(used) * 1e6,
                gflops=operations * num_rows / median / 1e9,
                gbs=weight_bytes / median / 1e9,
                roof_us=max(reading, computing) * 1e6,
            ),
            roofs,
        )


def describe(row: Row, roofs: Roofs) -> str:
    return (
        f"{row.shape:5} {row.linear:8} {row.num_rows:5} {row.median_us:10.1f} "
        f"({row.best_us:9.1f}) {row.gflops:8.1f} {row.gbs:6.1f}   "
        f"{row.share:4.0%}   {roofs.gflops:8.1f} {roofs.read_gbs:6.1f}"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instruction-set", default=_native.default_instruction_set())
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--threads", type=int, default=_native.num_physical_cores())
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32, 512])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write the rows there")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    print(f"linear, {args.instruction_set}, {args.dtype}, {args.threads} threads")
    print("shape linear    rows         us (     best)  GFLOP/s   GB/s  roof   roofs: GF/s   GB/s")
    results = []
    for name in args.shapes:
        for linear in linears(SHAPES[name]):
            for row, roofs in measure(name, linear, args.rows, args):
                print(describe(row, roofs), flush=True)
                results.append(asdict(row) | asdict(roofs))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
