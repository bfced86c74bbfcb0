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
import tempfile
from pathlib import Path
from typing import Any

from bench.adapters import write_adapter
from bench.checkpoints import SHAPES
from bench.family_shapes import ALL_SHAPES, checkpoint, shape_of
from lmi_core.bench.figures import Figure
from lmi_core.bench.offline import OfflineBench, StepLog
from lmi_core.bench.rooflines import ELEMENT_BYTES
from lmi_core.engine.engine import Engine
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.settings.lora_config import LoraConfig


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
        packs_behind=False,
        lora=None if rank is None else LoraConfig(max_rank=rank),
    )
    rows = []
    async with Engine(config, observer=log) as engine:
        bench = OfflineBench(shape_of(arguments.shape), arguments.dtype, engine, log)
        await bench.generate(64, 4, seed=0)
        if rank is not None:
            with tempfile.TemporaryDirectory() as directory:
                path = write_adapter(SHAPES[arguments.shape], rank, Path(directory))
                await engine.load_adapter("adapter", path)
        for num_tokens in arguments.prefill:
            rows.append(row(await bench.prefill(num_tokens, arguments.rounds)))
            show(arguments, rows[-1])
        for batch in arguments.batches:
            for adapter in ("", *engine.adapters):
                figure, gap = await bench.decode(batch, arguments.rounds, adapter)
                rows.append({**row(figure), "gap": gap})
                show(arguments, rows[-1])
    return rows


def row(figure: Figure) -> dict[str, Any]:
    return {
        "what": figure.name,
        "tokens_per_s": figure.median,
        "lowest": min(figure.values),
        "highest": max(figure.values),
        "share_of_roof": figure.share,
    }


def show(arguments: argparse.Namespace, row: dict[str, Any]) -> None:
    gap = f"  gap {row['gap']:6.2%}" if "gap" in row else ""
    print(
        f"{arguments.shape:>9} {arguments.dtype} {row['what']:<21} {row['tokens_per_s']:9.1f} tok/s"
        f" ({row['lowest']:.1f}-{row['highest']:.1f})  {row['share_of_roof']:6.1%} of roof{gap}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=ALL_SHAPES, default="160m")
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
