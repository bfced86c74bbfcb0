"""The engine on a GPU with random weights: prefill and decode, beside the device's roofs.

    LMI_OPS=native python -m bench.gpu.engine --shape llama3-8b --json engine.json

A step's roof is its bytes over the read rate or its operations over the rate of bf16 products,
whichever takes longer (``lmi_core.bench.rooflines``); rates are those that ``bench.gpu.roofs``
measured.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from bench.checkpoints import Shape
from bench.gpu.measure import attempt, parse, read_roofs, write
from bench.gpu.random_model import GPU_SHAPES, random_model
from lmi_core.bench.offline import StepLog
from lmi_core.bench.rooflines import decode_roof_s, prefill_roof_s
from lmi_core.bench.roofs import Roofs
from lmi_core.engine.engine import Engine
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.ops.kernels import select
from lmi_core.runners.device.device_runner import make_runner
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.text.tokenizer import Tokenizer

CONTEXT = 1024
NUM_CAPTURING = 16
"""Steps of a batch after which its graph is there."""


def placeholder_tokenizer() -> Tokenizer:
    """Prompts are ids, and every text is empty."""
    import tokenizers

    return Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel({"": 0}, "")), {})


async def generate(engine: Engine, num_prompt: int, num_new: int, vocab_size: int) -> None:
    prompt = [random.randrange(vocab_size) for _ in range(num_prompt)]
    params = SamplingParams(max_new_tokens=num_new, ignore_eos=True)
    async for _ in engine.generate(prompt, params):
        pass


async def measure(arguments: Any) -> list[dict[str, Any]]:
    shape = GPU_SHAPES[arguments.shape]
    device = torch.device(arguments.device)
    context, prefill, batches, num_new = (
        (16, 32, (1, 2), 24) if arguments.tiny else (CONTEXT, 2048, (1, 16, 64, 256), 96)
    )
    config = EngineConfig(
        model=Path(shape.name),
        device="cuda" if arguments.device == "cuda" else "torch-cpu",
        dtype="bf16",
        quantize=arguments.quantize,
        kv_dtype=arguments.kv_dtype,
        deterministic=arguments.deterministic,
        max_model_len=2 * max(prefill, context + num_new),
        max_num_seqs=max(batches),
        enable_prefix_caching=False,
        kv_cache_bytes=None if arguments.device == "cuda" else 8 << 20,
    )
    log = StepLog()
    roofs = roofs_of(arguments)
    rows: list[dict[str, Any]] = []
    chosen = select.select_for(device.type, is_deterministic=config.deterministic)
    model = random_model(shape, device, arguments.quantize)
    runner = make_runner(config, model, device, chosen)
    async with Engine(
        config, runner=runner, tokenizer=placeholder_tokenizer(), eos_token_ids=(), observer=log
    ) as engine:
        print(engine.info.runner, flush=True)
        for num_prompt, steps in ((prefill, 1), (context, num_new)):  # compiles and captures
            await generate(engine, num_prompt, steps, shape.vocab_size)
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            await generate(engine, prefill, 1, shape.vocab_size)
            seconds.append(time.perf_counter() - start)
        rows.append(
            attempt(f"prefill {prefill}", lambda: prefill_row(seconds, prefill, shape, roofs))
        )
        for batch in batches:
            for _ in range(2 if batch <= 16 else 1):  # the first steps capture
                log.steps.clear()
                await asyncio.gather(
                    *(generate(engine, context, num_new, shape.vocab_size) for _ in range(batch))
                )
            row = attempt(
                f"decode batch {batch}",
                lambda batch=batch: decode_row(log, batch, context + num_new / 2, shape, roofs),
            )
            rows.append(row)
            write(arguments.json, rows)
    return rows


def prefill_row(
    seconds: list[float], num_tokens: int, shape: Shape, roofs: Roofs | None
) -> dict[str, Any]:
    median = statistics.median(seconds)
    row = {"tokens_per_s": num_tokens / median, "ms": median * 1e3}
    if roofs is not None:
        row["share_of_roof"] = prefill_roof_s(shape, "bf16", num_tokens, roofs) / median
    return row


def decode_row(
    log: StepLog, batch: int, context: float, shape: Shape, roofs: Roofs | None
) -> dict[str, Any]:
    steps = list(log.decode_steps(batch))
    if len(steps) > 2 * NUM_CAPTURING:
        steps = steps[NUM_CAPTURING:]
    interval = statistics.median(interval for interval, _ in steps)
    row = {
        "tokens_per_s": batch / interval,
        "ms": interval * 1e3,
        "num_steps": len(steps),
        "gap": 1 - sum(native for _, native in steps) / sum(t for t, _ in steps),
    }
    if roofs is not None:
        row["share_of_bf16_roof"] = decode_roof_s(shape, "bf16", batch, context, roofs) / interval
    return row


def roofs_of(arguments: Any) -> Roofs | None:
    rates = read_roofs(arguments.json)
    if not rates:
        return None
    return Roofs(0, rates["read_gb_per_s"], 1e3 * rates["bf16_tflops"], 0.0)


if __name__ == "__main__":
    asyncio.run(
        measure(
            parse(
                __doc__,
                shape={"choices": sorted(GPU_SHAPES), "default": "llama3-8b"},
                quantize={"choices": ("int8", "int4", "fp8")},
                kv_dtype={"choices": ("auto", "int8", "fp8_e4m3fn", "fp8_e5m2"), "default": "auto"},
                deterministic={"action": "store_true"},
            )
        )
    )
