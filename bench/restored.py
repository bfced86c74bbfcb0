"""The first token of a long prompt whose prefix comes from files, beside that of a computed one."""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from bench.checkpoints import SHAPES, make_checkpoint
from lmi_core.engine.engine import Engine
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.settings.engine_config import EngineConfig


def drop_from_memory(directory: Path) -> int:
    """Let the page cache forget the directory's files; returns their bytes."""
    num_bytes = 0
    for path in directory.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            num_bytes += os.fstat(file).st_size
            os.close(file)
    return num_bytes


async def first_token_s(config: EngineConfig, num_tokens: int, *, in_memory: bool) -> float:
    """Seconds to the first token of an engine that was just started; it writes its blocks last."""
    async with Engine(config) as engine:
        # What is built at the first step is no part of either.
        async for _ in engine.generate([3, 4], SamplingParams(max_new_tokens=2)):
            pass
        if config.prefix_cache_dir is not None and not in_memory:
            drop_from_memory(config.prefix_cache_dir)
        started = time.perf_counter()
        ids = [5 + i % 997 for i in range(num_tokens)]
        async for _ in engine.generate(ids, SamplingParams(max_new_tokens=1)):
            break
        return time.perf_counter() - started


async def measure(args: argparse.Namespace) -> None:
    shape = replace(SHAPES[args.shape], max_positions=args.tokens + 64)
    model = make_checkpoint(shape, args.directory / f"restored-{args.shape}-{args.tokens}")
    with tempfile.TemporaryDirectory(dir=args.directory) as files:
        config = EngineConfig(model=model, kv_cache_bytes=1 << 30, prefix_cache_dir=Path(files))
        computed = await first_token_s(config, args.tokens, in_memory=True)
        num_bytes = drop_from_memory(Path(files))
        print(f"computed: {computed:.3f} s; {num_bytes / 1e6:.0f} MB are kept")
        for in_memory in (False, True):
            times = [
                await first_token_s(config, args.tokens, in_memory=in_memory)
                for _ in range(args.rounds)
            ]
            median = statistics.median(times)
            print(
                f"restored, files {'in' if in_memory else 'not in'} the page cache: {median:.3f} s "
                f"({min(times):.3f} to {max(times):.3f}), {computed / median:.1f} times sooner"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--shape", default="1.1b", choices=sorted(SHAPES))
    add("--tokens", type=int, default=8192)
    add("--rounds", type=int, default=3)
    add("--directory", type=Path, default=Path("build"), help="of the checkpoint and the files")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
