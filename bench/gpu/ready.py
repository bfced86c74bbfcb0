"""How long a server takes to be ready beyond reading its checkpoint, which is in the page cache.

    python -m bench.gpu.ready --shape llama3-8b

The second start finds the kernels that the first has compiled, and then serves over HTTP.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.checkpoints import make_checkpoint, random_bf16
from bench.gpu.measure import attempt, parse, write
from bench.gpu.shapes import GPU_SHAPES
from bench.server_process import started

SERVER_PACKAGES = ("lmi_server", "aiohttp", "msgspec", "prometheus_client")
PIECE_BYTES = 64 << 20
DEVICES = {"cuda": "cuda", "cpu": "torch-cpu"}


@cache
def _piece() -> bytes:
    return random_bf16(np.random.default_rng(0), (PIECE_BYTES // 8192, 4096), is_norm=False)


def make_tensor(_name: str, dims: tuple[int, ...]) -> Iterator[bytes]:
    """The same numbers again and again: drawing billions would take minutes."""
    left = 2 * int(np.prod(dims))
    piece = _piece()
    while left > 0:
        yield piece[:left]
        left -= min(left, len(piece))


def read(path: Path) -> float:
    """Seconds to read the file."""
    buffer = bytearray(PIECE_BYTES)
    start = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - start


def measure_start(model: Path, load: Sequence[str] = ()) -> dict[str, Any]:
    """``load``: options of ``bench.serving``, whose figures are added; none: nothing is served."""
    read_s, served = read(model / "model.safetensors"), {}
    missing = missing_for_serving()
    if missing:  # the engine alone can start
        ready_s = engine_start_s(model)
    else:
        with started([sys.executable, "-m", "lmi_core", "serve", str(model)]) as server:
            ready_s = server.start_s
            if load:
                served = serve(server.port, load)
    return {
        "started": f"engine: no server without {missing}" if missing else "server",
        "checkpoint_gb": round((model / "model.safetensors").stat().st_size * 1e-9, 2),
        "read_s": round(read_s, 2),
        "ready_s": round(ready_s, 2),
        "beyond_reading_s": round(ready_s - read_s, 2),
        **served,
    }


def serve(port: int, load: Sequence[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.serving", "--json", *load]
    command += ["--url", f"http://127.0.0.1:{port}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"requests failed: {done.stdout[-300:]}")
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def missing_for_serving() -> str:
    """The packages that the server wants and that aren't there."""
    return ", ".join(name for name in SERVER_PACKAGES if importlib.util.find_spec(name) is None)


def name_the_server(directory: Path) -> None:
    """Give the sources' ``server`` the name that it has where it is installed, before any that is,
    which may be of other sources and not fit this engine."""
    sources = Path(__file__).resolve().parents[2] / "server"
    spec = importlib.util.find_spec("lmi_server")
    if spec is None or spec.origin is None or Path(spec.origin).resolve().parent != sources:
        (directory / "lmi_server").symlink_to(sources)
        sys.path.insert(0, str(directory))
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)


def engine_start_s(model: Path) -> float:
    """From the creation of a process to its engine's being ready."""
    command = [sys.executable, "-c", _START_ENGINE, str(model), os.environ["OPTION_DEVICE"]]
    begin = time.perf_counter()
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if process.returncode != 0:
        raise RuntimeError(f"the engine's process ended with exit code {process.returncode}")
    return float(process.stdout.split()[-1]) - begin


_START_ENGINE = """if True:
    import asyncio, sys, time
    from pathlib import Path
    from bench.gpu.engine import placeholder_tokenizer
    from lmi_core.settings.engine_config import EngineConfig
    from lmi_core.runners.device.device_runner import load_device_runner
    from lmi_core.engine.engine import Engine

    async def start():
        cache_bytes = 8 << 20 if sys.argv[2] == "torch-cpu" else None
        config = EngineConfig(
            model=Path(sys.argv[1]), device=sys.argv[2], dtype="auto", kv_cache_bytes=cache_bytes
        )
        runner, _ = load_device_runner(config)
        tokenizer = placeholder_tokenizer()
        async with Engine(config, runner=runner, tokenizer=tokenizer, eos_token_ids=()):
            print(time.perf_counter())

    asyncio.run(start())
"""


def main() -> None:
    arguments = parse(__doc__, shape={"choices": sorted(GPU_SHAPES), "default": "llama3-8b"})
    os.environ["OPTION_DEVICE"] = DEVICES[arguments.device]
    with tempfile.TemporaryDirectory() as directory:
        name_the_server(Path(directory))
        shape = GPU_SHAPES[arguments.shape]
        model = make_checkpoint(shape, Path(directory, shape.name), make=make_tensor)
        concurrency, seconds = ("4", "2") if arguments.tiny else ("64", "8")
        load = ("--concurrency", concurrency, "--seconds", seconds, "--abort", "0.1")
        rows = []
        for which, wanted in (("first", ()), ("second", load)):
            start = partial(measure_start, model, wanted)
            rows.append(attempt(f"{shape.name}, {which} start", start))
            write(arguments.json, rows)


if __name__ == "__main__":
    main()
