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
from bench.gpu.random_model import random_model
from bench.gpu.shapes import GPU_SHAPES
from lmi_core.bench.offline import StepLog
from lmi_core.bench.rooflines import decode_roof_s, prefill_roof_s
from lmi_core.bench.roofs import Roofs
from lmi_core.engine.engine import Engine
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.ops.kernels import select
from lmi_core.runners.device.cuda_runner import CudaRunner
from lmi_core.runners.device.decode_graphs import GRAPH_BYTES
from lmi_core.runners.device.device_runner import make_runner
from lmi_core.runners.device.torch_runner import TorchRunner
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.text.tokenizer import Tokenizer

MODEL_OPTIONS: dict[str, dict[str, Any]] = {
    "quantize": {"choices": ("int8", "int4", "fp8")},
    "kv_dtype": {"choices": ("auto", "int8", "fp8_e4m3fn", "fp8_e5m2"), "default": "auto"},
}
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


def open_runner(arguments: Any, **changes: Any) -> tuple[EngineConfig, CudaRunner | TorchRunner]:
    """Random weights of ``arguments.shape`` on ``arguments.device``; ``LMI_OPS`` is followed."""
    shape = GPU_SHAPES[arguments.shape]
    is_cuda = arguments.device == "cuda"
    device = (
        torch.device("cuda", getattr(arguments, "index", 0)) if is_cuda else torch.device("cpu")
    )
    config = EngineConfig(
        model=Path(shape.name),
        device="cuda" if is_cuda else "torch-cpu",
        dtype="bf16",
        enable_prefix_caching=False,
        kv_cache_bytes=None if is_cuda else 8 << 20,
        **changes,
    )
    chosen = select.select_for(device.type, is_deterministic=config.deterministic)
    model = random_model(shape, device, config.quantize)
    return config, make_runner(config, model, device, chosen)


def open_engine(
    arguments: Any,
    log: StepLog,
    tokenizer: Tokenizer,
    eos_token_ids: tuple[int, ...] = (),
    **changes: Any,
) -> Engine:
    """An engine of ``open_runner``'s."""
    config, runner = open_runner(arguments, **changes)
    return Engine(
        config, runner=runner, tokenizer=tokenizer, eos_token_ids=eos_token_ids, observer=log
    )


async def measure(arguments: Any) -> list[dict[str, Any]]:
    if arguments.device == "cuda" and arguments.index >= torch.cuda.device_count():
        return [{"what": "all", "skipped": f"there are {torch.cuda.device_count()} GPUs"}]
    shape, log, roofs = GPU_SHAPES[arguments.shape], StepLog(), roofs_of(arguments)
    context, prefill, batches, num_new = (
        (16, 32, (1, 2), 24) if arguments.tiny else (CONTEXT, 2048, (1, 16, 64, 256), 96)
    )
    config, runner = open_runner(
        arguments,
        quantize=arguments.quantize,
        kv_dtype=arguments.kv_dtype,
        deterministic=arguments.deterministic,
        max_model_len=2 * max(prefill, context + num_new),
        max_num_seqs=max(batches),
    )
    engine = Engine(config, runner=runner, tokenizer=placeholder_tokenizer(), observer=log)
    async with engine:
        print(engine.info.runner, flush=True)
        kept_before = bytes_beyond_allocator(runner.device)
        for num_prompt, steps in ((prefill, 1), (context, num_new)):  # compiles and captures
            await generate(engine, num_prompt, steps, shape.vocab_size)
        seconds = [await prefill_s(engine, prefill, shape.vocab_size) for _ in range(3)]
        rows = [attempt(f"prefill {prefill}", lambda: prefill_row(seconds, prefill, shape, roofs))]
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
        rows.append(attempt("graphs", lambda: graph_row(runner, kept_before)))
    return rows


def bytes_beyond_allocator(device: torch.device) -> int:
    """Of a GPU: other processes' memory, and what the driver keeps for this one; else none."""
    if device.type != "cuda":
        return 0
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return total_bytes - free_bytes - torch.cuda.memory_reserved(device)


def graph_row(runner: CudaRunner | TorchRunner, kept_before: int) -> dict[str, Any]:
    """What the driver keeps of a graph, beside ``decode_graphs.GRAPH_BYTES``, which is assumed."""
    if isinstance(runner, CudaRunner):
        count = runner._steps.list.state().num_captured
    else:
        count = runner._graphs.num_captured if runner._graphs is not None else 0
    kept = bytes_beyond_allocator(runner.device) - kept_before
    return {
        "count": count,
        "mib_each": kept / max(1, count) / 2**20,
        "assumed_mib": GRAPH_BYTES / 2**20,
    }


async def prefill_s(engine: Engine, num_tokens: int, vocab_size: int) -> float:
    start = time.perf_counter()
    await generate(engine, num_tokens, 1, vocab_size)
    return time.perf_counter() - start


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
    }
    if roofs is not None:
        row["share_of_bf16_roof"] = decode_roof_s(shape, "bf16", batch, context, roofs) / interval
    return row


def roofs_of(arguments: Any) -> Roofs | None:
    rates = read_roofs(arguments.json)
    if not rates:
        return None
    return Roofs(0, rates["read_gb_per_s"], 1e3 * rates["bf16_tflops"], 0.0)


def main() -> None:
    arguments = parse(
        __doc__,
        shape={"choices": sorted(GPU_SHAPES), "default": "llama3-8b"},
        **MODEL_OPTIONS,
        deterministic={"action": "store_true"},
        index={"type": int, "default": 0, "help": "the GPU's number"},
    )
    write(arguments.json, asyncio.run(measure(arguments)))


if __name__ == "__main__":
    main()
