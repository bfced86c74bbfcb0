"""ONNX Runtime GenAI: one static batch, its own model builder."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from bench.peers.driver import Generate, Load, drive
from bench.peers.install import TORCH
from bench.peers.peer import Peer
from bench.peers.side import Side
from bench.peers.work import Timing


class OnnxRuntime(Peer):
    name = "onnxruntime-genai"
    formats = {"int4": "int4 block 32"}
    requirements = (
        "onnxruntime-genai==0.18.0",
        "onnx",
        "onnx-ir",
        "transformers==5.23.0",
        TORCH,
    )

    def convert(self, checkpoint: Path, dtype: str, target: Path) -> None:
        builder = ["-m", "onnxruntime_genai.models.builder", "-p", "int4", "-e", "cpu"]
        cache = self.home.path.absolute() / "cache"
        self.home.run(self.home.python, *builder, "-i", checkpoint, "-o", target, "-c", cache)

    def engine_side(self, load: Load) -> Side:
        return self.driver("bench.peers.onnxruntime", load)


def open_engine(load: Load) -> tuple[Generate, dict[str, Any]]:
    import onnxruntime_genai as genai

    threads = {"session_options": {"intra_op_num_threads": load.num_threads}}
    config = genai.Config(str(load.model))
    config.overlay(json.dumps({"model": {"decoder": threads}}))
    model = genai.Model(config)

    def generate(prompts: list[list[int]], num_new: int) -> list[Timing]:
        length = len(prompts[0]) + num_new
        params = genai.GeneratorParams(model)
        params.set_search_options(
            batch_size=len(prompts), do_sample=False, max_length=length, min_length=length
        )
        start = time.perf_counter()
        generator = genai.Generator(model, params)
        generator.append_tokens(prompts)
        times = []
        while not generator.is_done():
            generator.generate_next_token()
            times.append(time.perf_counter() - start)
        return [Timing(times[0], times[-1], len(times))] * len(prompts)

    return generate, {"version": genai.__version__}


if __name__ == "__main__":
    drive(open_engine)
