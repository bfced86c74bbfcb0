"""Transformers' continuous batching on the same shape, with random weights: tokens per second.

python -m bench.gpu.transformers_batching --shape qwen2-1.5b
"""

from __future__ import annotations

import random
import time
from typing import Any

import torch

from bench.checkpoints import config_of
from bench.gpu.measure import attempt, parse, write
from bench.gpu.shapes import GPU_SHAPES


def measure(arguments: Any, batch: int, num_prompt: int, num_new: int) -> dict[str, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    settings = config_of(GPU_SHAPES[arguments.shape])
    config = AutoConfig.for_model(**settings)
    with torch.device(arguments.device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
    vocab_size = int(settings["vocab_size"])
    prompts = [[random.randrange(3, vocab_size) for _ in range(num_prompt)] for _ in range(batch)]
    generation = GenerationConfig(
        max_new_tokens=num_new, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    seconds = []
    for _ in range(2):  # the first run warms up
        start = time.perf_counter()
        outputs = model.generate_batch(inputs=prompts, generation_config=generation)
        seconds.append(time.perf_counter() - start)
    num_tokens = sum(len(output.generated_tokens) for output in outputs.values())
    return {"tokens_per_s": num_tokens / seconds[-1], "num_tokens": num_tokens, "s": seconds[-1]}


if __name__ == "__main__":
    arguments = parse(__doc__, shape={"choices": sorted(GPU_SHAPES), "default": "qwen2-1.5b"})
    sizes = (2, 8, 4) if arguments.tiny else (64, 1024, 96)
    row = attempt(
        f"transformers, {sizes[0]} prompts of {sizes[1]} tokens, {sizes[2]} new ones each",
        lambda: measure(arguments, *sizes),
    )
    write(arguments.json, [row])
