"""What a GPU does while requests come and go: the heaviest kernels, and how long it does nothing.

    python -m bench.gpu.profile --shape llama3-8b --json profile.json

The profiler (CUPTI, by torch.profiler) notes when each kernel and copy began and ended. Idle is
what their union leaves of the time from the first to the last; what the engine says of its steps
can't show it, since steps are submitted ahead.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from bench.gpu.engine import open_engine, placeholder_tokenizer
from bench.gpu.measure import attempt, parse, write
from bench.gpu.shapes import GPU_SHAPES
from bench.gpu.turnover import PLAIN, TINY, USUAL, turn_over
from lmi_core.bench.offline import StepLog
from lmi_core.ops.kernels import select

NUM_HEAVIEST = 4
CATEGORIES = {"cuda": ("kernel", "gpu_memcpy", "gpu_memset"), "cpu": ("cpu_op",)}
"""Of the events in a trace that are work of the device; on a CPU they are torch's calls."""


def figures(events: Iterable[dict[str, Any]], categories: Iterable[str]) -> dict[str, Any]:
    """``idle``, a share, and the heaviest kernels with their share of what isn't idle."""
    work = sorted(
        (event["ts"], event["ts"] + event["dur"], str(event["name"]))
        for event in events
        if event.get("cat") in categories
    )
    if not work:
        raise RuntimeError("the profiler saw no work of the device")
    busy, end = 0.0, work[0][0]
    totals: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for first, last, name in work:
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
        totals[name] += last - first
        counts[name] += 1
    wall = end - work[0][0]
    return {
        "idle": 1 - busy / wall,
        "wall_ms": wall * 1e-3,
        "num_kernels": len(work),
        "heaviest": [
            {
                "kernel": name[:120],
                "share": total / totals.total(),
                "us": total / counts[name],
                "count": counts[name],
            }
            for name, total in totals.most_common(NUM_HEAVIEST)
        ],
    }


def read_trace(profiler: Any) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "trace.json")
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def start(device: str) -> Any:
    """Of every thread: steps are launched by one of their own."""
    from torch._C._profiler import _ExperimentalConfig

    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    everywhere = _ExperimentalConfig(profile_all_threads=True)
    return profile(activities=[activity], experimental_config=everywhere)


async def measure(arguments: Any, ops: str) -> dict[str, Any]:
    os.environ[select.VARIABLE] = ops
    load = TINY if arguments.tiny else USUAL
    engine = open_engine(
        arguments,
        StepLog(),
        placeholder_tokenizer(),
        max_num_seqs=load.num_at_once,
        max_model_len=load.longest_prompt + load.longest_output,
    )
    async with engine:
        await turn_over(engine, load, PLAIN)  # compiles and captures
        with start(arguments.device) as profiler:
            row = await turn_over(engine, load, PLAIN)
    return row | figures(read_trace(profiler), CATEGORIES[arguments.device])


def main() -> None:
    arguments = parse(__doc__, shape={"choices": sorted(GPU_SHAPES), "default": "llama3-8b"})
    rows = []
    # On the CPU torch sees its own calls alone.
    for ops in ("native", "triton") if arguments.device == "cuda" else ("",):
        name = ops or "torch"
        rows.append(attempt(name, lambda ops=ops: asyncio.run(measure(arguments, ops))))
        write(arguments.json, rows)


if __name__ == "__main__":
    main()
