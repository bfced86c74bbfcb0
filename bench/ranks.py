"""Ranks of a model beside one process on as many threads: tokens a second of decoding.

    python -m bench.ranks --shape 160m --degree 2 --rows 1 8 --rounds 5

One process on ``degree`` threads, the same with sums over a fixed number of slices
(``tp_invariant``, also on one process), and ``degree`` ranks of one thread each, by turns, each
loaded alone. Of each the median of its rounds; of its shares of what the first one had in the same
round the median and the quartiles.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time

from bench.copies import model_of, say
from lmi_core.engine.engine import Engine
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.settings.engine_config import EngineConfig

FIRST = "one process"
KV_BYTES = 512 << 20


async def tokens_per_s(engine: Engine, num_rows: int, num_tokens: int) -> float:
    params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True, temperature=0)

    async def one(row: int) -> float:
        first_s = 0.0
        async for _ in engine.generate([row + 10, 20, 21, 22], params):
            first_s = first_s or time.perf_counter()
        return first_s

    started_s = max(await asyncio.gather(*(one(row) for row in range(num_rows))))
    return num_rows * (num_tokens - 1) / (time.perf_counter() - started_s)


async def run(arguments: argparse.Namespace) -> None:
    degree = arguments.degree
    kinds = {
        FIRST: {"num_threads": degree},
        "one process, tp_invariant": {"num_threads": degree, "tp_invariant": True},
        "ranks": {"num_threads": 1, "tensor_parallel_degree": degree},
    }
    speeds: dict[tuple[str, int], list[float]] = {}
    for _ in range(arguments.rounds):
        for kind, settings in kinds.items():
            config = EngineConfig(
                model=model_of(arguments.shape),
                max_model_len=512,
                kv_cache_bytes=KV_BYTES,
                quantize=arguments.quantize,
                packs_behind=False,
                **settings,
            )
            async with Engine(config) as engine:
                await tokens_per_s(engine, 1, 16)
                for rows in arguments.rows:
                    speed = await tokens_per_s(engine, rows, arguments.tokens)
                    speeds.setdefault((kind, rows), []).append(speed)
    for (kind, rows), values in speeds.items():
        shares = [own / first for own, first in zip(values, speeds[FIRST, rows], strict=True)]
        low, middle, high = statistics.quantiles(shares, n=4, method="inclusive")
        say(
            f"{arguments.shape}, {rows} rows, {kind}: {statistics.median(values):.1f} tokens/s, "
            f"{middle:.2f}x ({low:.2f}-{high:.2f})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="160m")
    parser.add_argument("--degree", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quantize", default=None)
    print(f"{os.cpu_count()} cores", flush=True)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
