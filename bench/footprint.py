"""What a server takes to start and to hold: the first start, which packs the weights, the later
ones, which find them packed, and the memory above the weights while it serves.

    python -m bench.footprint --shape 1.1b --dtype bf16

Wants a quiet machine and room for a cache of packed weights under build/. Starts are timed from
the creation of the process to the first 200 of ``GET /ping``, the checkpoint in the page cache.
A virtual machine may not have the memory that a first start takes, and gets it from its host page
by page, which can take several times as long as the start; with ``--memory-at-hand`` it has.
Memory is the resident set while and after 32 streams of 128 prompt and 128 new tokens run at once,
less the size of the packed weights; an embedding's rows, which stay in the checkpoint, are above.
"""

from __future__ import annotations

import asyncio
import mmap
import shutil
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from bench.checkpoints import SHAPES, checkpoint
from bench.peers.load import LMI, wave
from bench.peers.work import WORKS, make_prompts, text_of
from bench.server_process import ServerProcess, started
from bench.starts import parse, report, starts_parser
from bench.startup import SERVE, memory_mb

CACHE = Path("build/footprint")
_HUGE_PAGE = 2 << 20
WRITE_TIMEOUT_S = 300.0
SERVE_TIMEOUT_S = 600.0
_COLUMNS = "| shape | dtype | KV | first start s | later starts s | packed MB | above, MB |"


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Memory in 10^6 bytes."""

    shape: str
    dtype: str
    kv_dtype: str
    first_start_s: float
    packed_mb: float
    num_starts: int
    start_s: float
    """Median of the later starts."""
    worst_start_s: float
    above_weights_mb: float
    """After the streams."""
    peak_above_weights_mb: float


def measure(
    shape: str, dtype: str, kv_dtype: str, num_starts: int, *, has_memory: bool
) -> Footprint:
    command = server_command(shape, dtype, kv_dtype)
    shutil.rmtree(CACHE, ignore_errors=True)
    if has_memory:
        touch_memory(sum(path.stat().st_size for path in checkpoint(shape).glob("*.safetensors")))
    with started(command) as server:
        first_s = server.start_s
        packed_mb = wait_for_packed_file() * 1e-6
    seconds = []
    for _ in range(num_starts - 1):
        with started(command) as server:
            seconds.append(server.start_s)
    with started(command) as server:
        seconds.append(server.start_s)
        serve(server)
        resident_mb, peak_mb = memory_mb(server.pid)
    shutil.rmtree(CACHE)
    return Footprint(
        shape=shape,
        dtype=dtype,
        kv_dtype=kv_dtype,
        first_start_s=round(first_s, 3),
        packed_mb=round(packed_mb, 1),
        num_starts=num_starts,
        start_s=round(statistics.median(seconds), 3),
        worst_start_s=round(max(seconds), 3),
        above_weights_mb=round(resident_mb - packed_mb, 1),
        peak_above_weights_mb=round(peak_mb - packed_mb, 1),
    )


def server_command(shape: str, dtype: str, kv_dtype: str) -> list[str]:
    model = checkpoint(shape)
    for path in model.glob("*.safetensors"):
        with path.open("rb") as file:  # into the page cache
            while file.read(1 << 24):
                pass
    options = {"repack_cache_dir": str(CACHE.absolute()), "kv_cache_dtype": kv_dtype}
    if dtype in ("int8", "int4"):
        options["quantize"] = dtype
    else:
        options["dtype"] = dtype
    written = [part for key, value in options.items() for part in ("--option", f"{key}={value}")]
    return [*SERVE, str(model), "--log-level", "warning", "--max-batch-size", "32", *written]


def touch_memory(num_bytes: int) -> None:
    """Write to so much memory and half as much again, and leave it to the next process."""
    size = -(-3 * num_bytes // 2 // _HUGE_PAGE) * _HUGE_PAGE
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for offset in range(0, size, 4096):
            memory[offset] = 1


def wait_for_packed_file() -> int:
    """Its bytes."""
    deadline = time.monotonic() + WRITE_TIMEOUT_S
    while time.monotonic() < deadline:
        for path in CACHE.glob("*.packed"):
            return path.stat().st_size
        time.sleep(0.2)
    sys.exit(f"no packed weights in {CACHE} after {WRITE_TIMEOUT_S:g} s")


def serve(server: ServerProcess) -> None:
    work = WORKS["serve32"]
    texts = [text_of(prompt) for prompt in make_prompts(work, seed=1)]
    asyncio.run(wave(server.port, LMI, texts, work.num_new, SERVE_TIMEOUT_S))


def row(figures: Footprint) -> str:
    """One row under ``_COLUMNS``."""
    return (
        f"| {figures.shape} | {figures.dtype} | {figures.kv_dtype} | {figures.first_start_s:.2f} |"
        f" {figures.start_s:.2f} (worst {figures.worst_start_s:.2f} of {figures.num_starts}) |"
        f" {figures.packed_mb:.0f} | {figures.above_weights_mb:.0f} (peak "
        f"{figures.peak_above_weights_mb:.0f}) |"
    )


def main() -> None:
    parser = starts_parser(__doc__, "after the first")
    parser.add_argument("--shape", choices=[name for name in SHAPES if name != "near-zero"])
    parser.add_argument("--dtype", choices=("bf16", "fp32", "int8", "int4"), default="bf16")
    parser.add_argument("--kv-dtype", choices=("auto", "bf16", "fp32", "int8"), default="auto")
    parser.add_argument(
        "--memory-at-hand", action="store_true", help="write to as much before the first start"
    )
    parser.set_defaults(shape="1.1b")
    args = parse(parser)
    figures = measure(
        args.shape, args.dtype, args.kv_dtype, args.starts, has_memory=args.memory_at_hand
    )
    report(figures, _COLUMNS, row(figures), as_json=args.json)


if __name__ == "__main__":
    main()
