"""Where a step's time goes: the nodes of the step graph, while the engine generates.

    python -m bench.nodes --shape 160m --dtype bf16 --batches 1 8 32

A row is all nodes of one op (of one weight shape): wall time until the next node began, and CPU
time of all threads inside the node's chunks, per step. ``roof`` is what a linear must take: its
weight's bytes at the read bandwidth or its multiply-adds at their rate on all threads, whichever is
longer. Wall time well above ``cpu / threads`` is imbalance, waiting, or somebody else on the
cores.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass

from bench.family_shapes import ALL_SHAPES, checkpoint, shape_of
from lmi_core.bench.offline import NUM_NEW, NUM_PROMPT, OfflineBench, StepLog
from lmi_core.bench.rooflines import ELEMENT_BYTES, gflops_of
from lmi_core.bench.roofs import Roofs, measure_roofs
from lmi_core.engine.engine import Engine
from lmi_core.runners.cpu.cpu_runner import CpuRunner, load_cpu_runner
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.text.tokenizer import Tokenizer

WEIGHT = re.compile(r" x (\w+)\[(\d+), (\d+)\]")


@dataclass(slots=True)
class OpTime:
    """Per step."""

    name: str
    num_nodes: int = 0
    wall_us: float = 0.0
    cpu_us: float = 0.0
    roof_us: float = 0.0

    def line(self, total_us: float, num_threads: int) -> str:
        roof = f"{self.roof_us:9.1f} {self.roof_us / self.wall_us:5.0%}" if self.roof_us else ""
        return (
            f"  {self.name:<32} {self.num_nodes:3} {self.wall_us:9.1f}"
            f" {self.wall_us / total_us:5.1%} {self.cpu_us / num_threads:9.1f} {roof}"
        )


def linear_roof_us(weight: re.Match[str], num_rows: int, roofs: Roofs) -> float:
    dtype, num_weights = weight[1], int(weight[2]) * int(weight[3])
    return (
        max(
            ELEMENT_BYTES[dtype] * num_weights / roofs.read_gb_per_s,
            2 * num_weights * num_rows / gflops_of(dtype, roofs),
        )
        / 1e3
    )


def sum_by_op(runner: CpuRunner, num_rows: int, roofs: Roofs) -> Iterator[OpTime]:
    """In the order of their first nodes."""
    ops: dict[str, OpTime] = {}
    for text, (num_steps, wall_ns, cpu_ns, _) in zip(
        runner.graph.describe(), runner.graph.node_times(), strict=True
    ):
        name, weight = text.split()[0], WEIGHT.search(text)
        if weight is not None:
            name += weight[0].replace(" x ", " ")
        op = ops.setdefault(name, OpTime(name))
        op.num_nodes += 1
        op.wall_us += wall_ns / max(num_steps, 1) / 1e3
        op.cpu_us += cpu_ns / max(num_steps, 1) / 1e3
        if weight is not None:
            op.roof_us += linear_roof_us(weight, num_rows, roofs)
    yield from ops.values()


def show(runner: CpuRunner, num_tokens: int, what: str) -> None:
    num_threads = runner.info.num_threads
    roofs = measure_roofs(num_threads)
    ops = list(sum_by_op(runner, num_tokens, roofs))
    total_us = sum(op.wall_us for op in ops)
    num_steps = runner.graph.node_times()[0][0]
    print(f"{what}: {total_us:.0f} us a step on {num_threads} threads, {num_steps} steps")
    print(f"  {'op':<32} {'n':>3} {'wall us':>9} {'':>5} {'cpu/thr':>9} {'roof':>9}")
    for op in sorted(ops, key=lambda op: -op.wall_us):
        print(op.line(total_us, num_threads), flush=True)


def config_of(shape: str, dtype: str, max_num_seqs: int, num_threads: int | None) -> EngineConfig:
    is_quantized = dtype in ("int8", "int4")
    return EngineConfig(
        model=checkpoint(shape),
        dtype="bf16" if is_quantized else dtype,  # type: ignore[arg-type]
        quantize=dtype if is_quantized else None,  # type: ignore[arg-type]
        max_num_seqs=max_num_seqs,
        num_threads=num_threads,
        enable_prefix_caching=False,
        repack_cache_dir="none",
        packs_behind=False,
    )


async def run(arguments: argparse.Namespace) -> None:
    num_seqs = max(arguments.batches, default=1)
    config = config_of(arguments.shape, arguments.dtype, num_seqs, arguments.threads)
    runner, model = load_cpu_runner(config)
    tokenizer = Tokenizer.load(config.model, vocab_size=runner.info.vocab_size)
    async with Engine(config, runner=runner, tokenizer=tokenizer) as engine:
        bench = OfflineBench(shape_of(arguments.shape), arguments.dtype, engine, StepLog())
        await bench.generate(64, 4, seed=0)
        for num_tokens in arguments.prefill:
            runner.graph.measure_nodes(num_tokens)
            for seed in range(4):
                await bench.generate(num_tokens, 1, seed)
            show(runner, num_tokens, f"prefill {num_tokens}")
        for batch in arguments.batches:
            for num_tokens in (0, batch):  # the first time touches the cache's pages
                runner.graph.measure_nodes(num_tokens)
                await asyncio.gather(
                    *(bench.generate(NUM_PROMPT, NUM_NEW, seed) for seed in range(batch))
                )
            show(runner, batch, f"decode batch {batch}")
    del model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=ALL_SHAPES, default="160m")
    parser.add_argument("--dtype", choices=sorted(ELEMENT_BYTES), default="bf16")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--prefill", type=int, nargs="*", default=[])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32])
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
