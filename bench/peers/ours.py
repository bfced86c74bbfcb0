"""Our own side: the engine behind the line protocol, and the server over HTTP."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any, Literal

from bench.peers.driver import Generate, Load, arguments_of, drive
from bench.peers.load import COMPLETIONS, LMI
from bench.peers.peer import GGUF_DTYPES
from bench.peers.process import Command
from bench.peers.side import HttpSide, LineSide, Side
from bench.peers.work import Timing

DTYPES = ("bf16", "fp32", "int8", "int4", *GGUF_DTYPES)
"""Of GGUF's types both sides take the same file, which the peer's converter wrote."""
LOGS = Path("build/peers/logs")


def quantize_of(dtype: str) -> Literal["int8", "int4"] | None:
    match dtype:
        case "int8" | "int4":
            return dtype
        case _:
            return None


def engine_side(load: Load) -> Side:
    arguments = [sys.executable, "-m", "bench.peers.ours", *arguments_of(load)]
    return LineSide(Command(arguments, LOGS / "ours-engine.log"))


def server_side(load: Load, *, asks_completions: bool = False) -> Side:
    """Asked by its own route, or by OpenAI's, under the name that peers give their model."""

    def command(port: int) -> Command:
        quantize = quantize_of(load.dtype)
        weights = f"--option option.quantize={quantize}" if quantize else f"--dtype {load.dtype}"
        if load.dtype in GGUF_DTYPES:
            weights = ""
        options = (
            f"--host 127.0.0.1 --port {port} --log-level warning {weights}"
            f" --max-batch-size {load.max_num_seqs} --threads {load.num_threads}"
            " --option option.repack_cache_dir=none"
        )
        name = ["--served-model-name", "model"] if asks_completions else []
        serve = [sys.executable, "-m", "lmi_core", "serve", str(load.model)]
        return Command([*serve, *options.split(), *name], LOGS / "ours-server.log")

    return HttpSide(command, COMPLETIONS if asks_completions else LMI)


def open_engine(load: Load) -> tuple[Generate, dict[str, Any]]:
    from lmi_core import __version__
    from lmi_core.engine.engine import Engine
    from lmi_core.engine.sampling_params import SamplingParams
    from lmi_core.settings.engine_config import EngineConfig
    from lmi_core.weights.gguf.directory import model_directory

    engine = Engine(
        EngineConfig(
            model=model_directory(load.model),
            dtype="fp32" if load.dtype == "fp32" else "bf16",
            quantize=quantize_of(load.dtype),
            num_threads=load.num_threads,
            max_num_seqs=load.max_num_seqs,
            enable_prefix_caching=False,
            repack_cache_dir="none",
            packs_behind=False,
        )
    )
    runner = asyncio.Runner()
    runner.run(engine.start())

    async def generate_one(prompt: list[int], num_new: int, start: float) -> Timing:
        first_s = last_s = 0.0
        num_tokens = 0
        params = SamplingParams(max_new_tokens=num_new, ignore_eos=True)
        async for event in engine.generate(prompt, params):
            last_s = time.perf_counter() - start
            first_s = first_s or last_s
            num_tokens = event.num_generated_tokens
        return Timing(first_s, last_s, num_tokens)

    async def generate_all(prompts: list[list[int]], num_new: int) -> list[Timing]:
        start = time.perf_counter()
        return await asyncio.gather(*(generate_one(p, num_new, start) for p in prompts))

    def generate(prompts: list[list[int]], num_new: int) -> list[Timing]:
        return runner.run(generate_all(prompts, num_new))

    return generate, {"version": __version__}


if __name__ == "__main__":
    drive(open_engine)
