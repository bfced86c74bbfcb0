"""Hugging Face Transformers: ``generate`` on one static batch, eager attention by SDPA."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from bench.peers.driver import Generate, Load, drive
from bench.peers.install import TORCH
from bench.peers.peer import Peer, link_checkpoint
from bench.peers.side import Side
from bench.peers.work import Timing


class Transformers(Peer):
    name = "transformers"
    formats = {"bf16": "bf16", "fp32": "fp32"}
    requirements = ("transformers==5.23.0", TORCH)

    def convert(self, checkpoint: Path, dtype: str, target: Path) -> None:
        link_checkpoint(checkpoint, target)

    def engine_side(self, load: Load) -> Side:
        return self.driver(
            "bench.peers.hf_transformers", load, {"OMP_NUM_THREADS": str(load.num_threads)}
        )


def open_engine(load: Load) -> tuple[Generate, dict[str, Any]]:
    import torch
    import transformers

    torch.set_num_threads(load.num_threads)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[load.dtype]
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(load.model, dtype=dtype)
    model.eval()
    model.generation_config.eos_token_id = None

    class Clock(transformers.StoppingCriteria):
        """Called after every token; never stops."""

        def __init__(self, num_rows: int) -> None:
            self.times: list[float] = []
            self._goes_on = torch.zeros(num_rows, dtype=torch.bool)

        def __call__(self, input_ids: Any, scores: Any, **options: Any) -> torch.Tensor:
            self.times.append(time.perf_counter())
            return self._goes_on

    @torch.inference_mode()
    def generate(prompts: list[list[int]], num_new: int) -> list[Timing]:
        ids = torch.tensor(prompts)
        clock = Clock(len(prompts))
        start = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_new,
            pad_token_id=0,
            stopping_criteria=transformers.StoppingCriteriaList([clock]),
        )
        timing = Timing(clock.times[0] - start, clock.times[-1] - start, len(clock.times))
        return [timing] * len(prompts)

    return generate, {"version": transformers.__version__, "torch": torch.__version__}


if __name__ == "__main__":
    drive(open_engine)
