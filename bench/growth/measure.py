"""Measures the points of one engine in a process of its own, whose memory is then theirs:

    python -m bench.growth.measure '{"shape": "160m", "dtype": "bf16", "points": []}'

A line says that it is ready. Then each line in, ``[number of the point, round]``, is answered by
one, ``[seconds, resident MB]``.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.adapters import write_adapter
from bench.checkpoints import Shape, make_checkpoint
from bench.growth.point import ADAPTER_RANK, MAX_POSITIONS, Point, shape_of
from lmi_core.bench.offline import StepLog
from lmi_core.bench.rooflines import kv_bytes
from lmi_core.engine.engine import Engine
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.settings.lora_config import LoraConfig


def config_of(shape: Shape, dtype: str, points: list[Point], log_dir: Path) -> EngineConfig:
    quantize = dtype if dtype in ("int8", "int4") else None
    num_adapters = points[0].num_adapters
    adapters = tuple((f"a{i}", log_dir / f"a{i}") for i in range(num_adapters))
    token_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * kv_bytes(dtype)
    num_tokens = max(point.num_tokens for point in points)
    return EngineConfig(
        model=make_checkpoint(shape, Path("build/models") / shape.name),
        dtype="bf16" if quantize else dtype,  # type: ignore[arg-type]
        quantize=quantize,  # type: ignore[arg-type]
        max_num_seqs=max(point.batch for point in points),
        max_model_len=min(MAX_POSITIONS, max(point.max_model_len for point in points)),
        kv_cache_bytes=int(1.5 * token_bytes * num_tokens) + (64 << 20),
        num_threads=points[0].num_threads or None,
        packs_behind=False,
        lora=LoraConfig(max_rank=ADAPTER_RANK, adapters=adapters) if adapters else None,
    )


class Measurement:
    def __init__(self, engine: Engine, log: StepLog, vocab_size: int) -> None:
        self.engine = engine
        self.log = log
        self.vocab_size = vocab_size

    def prompt(self, length: int, seed: int) -> list[int]:
        rng = random.Random(seed)
        return [rng.randrange(300, self.vocab_size) for _ in range(length)]

    async def generate(self, prompt: list[int], num_new: int, adapter: str = "") -> None:
        events = self.engine.generate(
            prompt, max_new_tokens=num_new, ignore_eos=True, adapter=adapter
        )
        async for _ in events:
            pass

    async def seconds(self, point: Point, seed: int) -> float:
        return await (self.first_token if point.prompt else self.step)(point, seed)

    async def step(self, point: Point, seed: int) -> float:
        """Median interval between steps of the whole batch."""
        if seed == 0:  # The prefix cache then spares the prompts, during which the first would end.
            await self.decode(point)
        self.log.steps.clear()
        await self.decode(point)
        return statistics.median(interval for interval, _ in self.log.decode_steps(point.batch))

    async def decode(self, point: Point) -> None:
        length = max(1, point.context - point.num_new // 2)
        names = list(self.engine.adapters) or [""]
        await asyncio.gather(
            *(
                self.generate(self.prompt(length, n), point.num_new, names[n % len(names)])
                for n in range(point.batch)
            )
        )

    async def first_token(self, point: Point, seed: int) -> float:
        prefix = self.prompt(point.shared, 1)
        if prefix:
            await self.generate(prefix, 1)
        own = self.prompt(point.prompt - point.shared, 1000 + seed)
        start = time.perf_counter()
        await self.generate(prefix + own, 1)
        return time.perf_counter() - start


def resident_mb() -> float:
    """In 10^6 bytes, now."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024e-6


async def measure(request: dict[str, Any]) -> None:
    points = [Point(**fields) for fields in request["points"]]
    shape = shape_of(request["shape"], points[0].vocab_size)
    log = StepLog()
    with tempfile.TemporaryDirectory() as directory:
        for i in range(points[0].num_adapters):
            write_adapter(shape, ADAPTER_RANK, Path(directory) / f"a{i}")
        config = config_of(shape, request["dtype"], points, Path(directory))
        async with Engine(config, observer=log) as engine:
            run = Measurement(engine, log, shape.vocab_size)
            await run.generate(run.prompt(64, 0), 4)
            print("ready", flush=True)
            for line in sys.stdin:
                number, seed = json.loads(line)
                seconds = await run.seconds(points[number], seed)
                print(json.dumps([seconds, resident_mb()]), flush=True)


if __name__ == "__main__":
    asyncio.run(measure(json.loads(sys.argv[1])))
