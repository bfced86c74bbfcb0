"""Prefill and decode speed of the engine, each beside the machine's roof of the same minute.

    python -m bench.engine --shape 160m --dtype bf16
    python -m bench.engine --batches 8 --adapter-rank 16

Every figure is a median over several rounds; before and after each round the roofs are measured
again, and a share is the ratio to their mean. ``gap`` is (step interval - native time) / step
interval of the decode steps: what the engine adds to the kernels. The decode roof is the bytes
that a step must read (weights of all linears, the head, and the KV cache) over the read bandwidth,
or its operations over the multiply-add rate, whichever is longer; prefill counts operations.

With a rank, LoRA is on, and every batch decodes twice: as the base model, then with an adapter of
all linears in every row. The roofs are the base model's in both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.adapters import write_adapter
from bench.checkpoints import SHAPES, Shape, checkpoint
from bench.rooflines import ELEMENT_BYTES, decode_roof_s, prefill_roof_s
from bench.roofs import measure_roofs
from lmi_core.engine.engine import Engine
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.engine.stats import NullObserver, StepRecord
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.settings.lora_config import LoraConfig


class StepLog(NullObserver):
    """Remembers when each step ended and how long the worker took for it."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, StepRecord]] = []

    def on_step(self, step: StepRecord) -> None:
        self.steps.append((time.perf_counter(), step))

    def decode_steps(self, batch: int) -> Iterator[tuple[float, float]]:
        """(interval, native time) of steps that follow one of the same ``batch`` decode rows."""
        for (before, first), (after, second) in zip(self.steps, self.steps[1:], strict=False):
            if first.num_tokens == second.num_tokens == batch:
                yield after - before, second.native_seconds


@dataclass(frozen=True, slots=True)
class Bench:
    shape: Shape
    dtype: str
    engine: Engine
    log: StepLog
    num_threads: int

    async def generate(self, num_prompt: int, num_new: int, seed: int, adapter: str = "") -> None:
        rng = random.Random(seed)
        prompt = [rng.randrange(300, self.shape.vocab_size) for _ in range(num_prompt)]
        params = SamplingParams(max_new_tokens=num_new, ignore_eos=True)
        async for _ in self.engine.generate(prompt, params, adapter=adapter):
            pass

    async def prefill(self, num_tokens: int, rounds: int) -> dict[str, Any]:
        rates, shares = [], []
        for i in range(rounds):
            before = measure_roofs(self.num_threads)
            start = time.perf_counter()
            await self.generate(num_tokens, 1, seed=1000 * num_tokens + i)
            seconds = time.perf_counter() - start
            after = measure_roofs(self.num_threads)
            roof_s = statistics.mean(
                prefill_roof_s(self.shape, self.dtype, num_tokens, r) for r in (before, after)
            )
            rates.append(num_tokens / seconds)
            shares.append(roof_s / seconds)
        return row(f"prefill {num_tokens}", rates, shares)

    async def decode(self, batch: int, rounds: int, adapter: str = "") -> dict[str, Any]:
        rates, shares, gaps = [], [], []
        for i in range(rounds):
            self.log.steps.clear()
            before = measure_roofs(self.num_threads)
            await asyncio.gather(
                *(self.generate(128, 128, 10**6 * i + n, adapter) for n in range(batch))
            )
            after = measure_roofs(self.num_threads)
            steps = list(self.log.decode_steps(batch))
            interval = statistics.median(interval for interval, _ in steps)
            roof_s = statistics.mean(
                decode_roof_s(self.shape, self.dtype, batch, 192, r) for r in (before, after)
            )
            rates.append(batch / interval)
            shares.append(roof_s / interval)
            gaps.append(1 - sum(native for _, native in steps) / sum(t for t, _ in steps))
        what = f"decode batch {batch}" + (" LoRA" if adapter else "")
        return {**row(what, rates, shares), "gap": statistics.median(gaps)}


def row(what: str, rates: list[float], shares: list[float]) -> dict[str, Any]:
    return {
        "what": what,
        "tokens_per_s": statistics.median(rates),
        "lowest": min(rates),
        "highest": max(rates),
        "share_of_roof": statistics.median(shares),
    }


async def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    log = StepLog()
    rank: int | None = arguments.adapter_rank
    quantize = arguments.dtype if arguments.dtype in ("int8", "int4") else None
    config = EngineConfig(
        model=checkpoint(arguments.shape),
        dtype="bf16" if quantize else arguments.dtype,
        quantize=quantize,
        max_num_seqs=max(arguments.batches),
        num_threads=arguments.threads,
        enable_prefix_caching=False,
        repack_cache_dir="none",
        lora=None if rank is None else LoraConfig(max_rank=rank),
    )
    rows = []
    async with Engine(config, observer=log) as engine:
        bench = Bench(
            SHAPES[arguments.shape], arguments.dtype, engine, log, engine.info.runner.num_threads
        )
        await bench.generate(64, 4, seed=0)
        if rank is not None:
            with tempfile.TemporaryDirectory() as directory:
                path = write_adapter(bench.shape, rank, Path(directory))
                await engine.load_adapter("adapter", path)
        for num_tokens in arguments.prefill:
            rows.append(await bench.prefill(num_tokens, arguments.rounds))
            show(arguments, rows[-1])
        for batch in arguments.batches:
            for adapter in ("", *engine.adapters):
                rows.append(await bench.decode(batch, arguments.rounds, adapter))
                show(arguments, rows[-1])
    return rows


def show(arguments: argparse.Namespace, row: dict[str, Any]) -> None:
    gap = f"  gap {row['gap']:6.2%}" if "gap" in row else ""
    print(
        f"{arguments.shape:>9} {arguments.dtype} {row['what']:<21} {row['tokens_per_s']:9.1f} tok/s"
        f" ({row['lowest']:.1f}-{row['highest']:.1f})  {row['share_of_roof']:6.1%} of roof{gap}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="160m")
    parser.add_argument("--dtype", choices=sorted(ELEMENT_BYTES), default="bf16")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prefill", type=int, nargs="*", default=[512, 2048])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--adapter-rank", type=int, help="decode with a LoRA adapter, too")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    arguments = parser.parse_args()
    rows = asyncio.run(run(arguments))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
