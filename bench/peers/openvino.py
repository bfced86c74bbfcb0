"""OpenVINO GenAI: continuous batching, no HTTP server in its wheel."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from bench.peers.driver import Generate, Load, drive
from bench.peers.install import TORCH, Home
from bench.peers.peer import Peer
from bench.peers.side import Side
from bench.peers.work import Timing

KV_GIB = 2
INT4_GROUP = 64
"""Divides the hidden sizes of every shape."""


class OpenVino(Peer):
    name = "openvino"
    formats = {"bf16": "fp16 weights, bf16", "int8": "int8", "int4": f"int4 sym {INT4_GROUP}"}
    requirements = (
        "openvino-genai==2026.4.1.0",
        "optimum-intel==2.2.0",
        "nncf==3.4.0",
        "transformers<5.6",
        TORCH,
    )

    def install_steps(self, home: Home) -> None:
        super().install_steps(home)
        # Nothing needs it, and the one that is resolved goes with another build of torch.
        home.pip("uninstall", "--yes", "torchvision")

    def convert(self, checkpoint: Path, dtype: str, target: Path) -> None:
        weights = {"bf16": "fp16", "int8": "int8", "int4": "int4"}[dtype]
        grouping = f"--ratio 1.0 --group-size {INT4_GROUP} --sym" if dtype == "int4" else ""
        self.home.run(
            self.home.program("optimum-cli").absolute(),
            *["export", "openvino", "--task", "text-generation-with-past", "--weight-format"],
            weights,
            *grouping.split(),
            "--model",
            checkpoint,
            target,
        )

    def engine_side(self, load: Load) -> Side:
        return self.driver("bench.peers.openvino", load)


def open_engine(load: Load) -> tuple[Generate, dict[str, Any]]:
    import openvino
    import openvino_genai as genai

    scheduling = genai.SchedulerConfig()
    scheduling.cache_size = KV_GIB
    scheduling.max_num_seqs = load.max_num_seqs
    scheduling.max_num_batched_tokens = 2048
    scheduling.enable_prefix_caching = False
    settings = {"INFERENCE_NUM_THREADS": load.num_threads, "INFERENCE_PRECISION_HINT": "bf16"}
    pipeline = genai.ContinuousBatchingPipeline(str(load.model), scheduling, "CPU", settings)
    numbers = iter(range(1 << 30))

    def generate(prompts: list[list[int]], num_new: int) -> list[Timing]:
        import numpy as np

        config = genai.GenerationConfig()
        config.max_new_tokens = num_new
        config.min_new_tokens = num_new
        config.ignore_eos = True
        config.do_sample = False
        start = time.perf_counter()
        handles = [
            pipeline.add_request(
                next(numbers), openvino.Tensor(np.array([prompt], np.int64)), config
            )
            for prompt in prompts
        ]
        first_s = [0.0] * len(handles)
        last_s = [0.0] * len(handles)
        counts = [0] * len(handles)
        while pipeline.has_non_finished_requests():
            pipeline.step()
            now = time.perf_counter() - start
            for i, handle in enumerate(handles):
                while handle.can_read():
                    outputs = handle.read()
                    counts[i] += sum(len(output.generated_ids) for output in outputs.values())
                    first_s[i] = first_s[i] or now
                    last_s[i] = now
        return [Timing(*timing) for timing in zip(first_s, last_s, counts, strict=True)]

    return generate, {"version": genai.__version__}


if __name__ == "__main__":
    drive(open_engine)
