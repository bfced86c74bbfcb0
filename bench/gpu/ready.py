"""How long a server takes to be ready beyond reading its checkpoint, which is in the page cache.

    python -m bench.gpu.ready --shape llama3-8b

The second start finds the kernels that the first has compiled.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.checkpoints import make_checkpoint, random_bf16
from bench.gpu.measure import attempt, parse, write
from bench.gpu.random_model import GPU_SHAPES
from bench.server_process import started

PIECE_BYTES = 64 << 20
DEVICES = {"cuda": "cuda", "cpu": "torch-cpu"}
_PIECE = random_bf16(np.random.default_rng(0), (PIECE_BYTES // 8192, 4096), is_norm=False)


def make_tensor(_name: str, dims: tuple[int, ...]) -> Iterator[bytes]:
    """The same numbers again and again: drawing billions would take minutes."""
    left = 2 * int(np.prod(dims))
    while left > 0:
        yield _PIECE[:left]
        left -= min(left, len(_PIECE))


def read(path: Path) -> float:
    """Seconds to read the file."""
    buffer = bytearray(PIECE_BYTES)
    start = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - start


def measure_start(model: Path) -> dict[str, Any]:
    read_s = read(model / "model.safetensors")
    with started([sys.executable, "-m", "lmi_core", "serve", str(model)]) as server:
        ready_s = server.start_s
    return {
        "checkpoint_gb": round((model / "model.safetensors").stat().st_size * 1e-9, 2),
        "read_s": round(read_s, 2),
        "ready_s": round(ready_s, 2),
        "beyond_reading_s": round(ready_s - read_s, 2),
    }


def main() -> None:
    arguments = parse(__doc__, shape={"choices": sorted(GPU_SHAPES), "default": "llama3-8b"})
    os.environ["OPTION_DEVICE"] = DEVICES[arguments.device]
    with tempfile.TemporaryDirectory() as directory:
        shape = GPU_SHAPES[arguments.shape]
        model = make_checkpoint(shape, Path(directory, shape.name), make=make_tensor)
        rows = [
            attempt(f"{shape.name}, {which} start", partial(measure_start, model))
            for which in ("first", "second")
        ]
    write(arguments.json, rows)


if __name__ == "__main__":
    main()
