"""What drafts bring: texts that were generated before, edited ones, and ones that nothing is like.

    python -m bench.drafts --shape 160m --dtype bf16 --batches 1 8

An engine that drafts and one that doesn't generate the same requests in turn, round by round; each
figure is the median of the rounds' ratios of their speeds, beside the tokens that a step brought a
sequence and the share of drafts that were right. ``replay``: the text was generated before.
``edit``: so was one of which a fifth of the tokens, at random places, are others. ``free``: nothing
like it was. ``repeat``: greedy texts, which repeat themselves with random weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from bench.checkpoints import SHAPES, checkpoint
from lmi_core.engine import speculation
from lmi_core.engine.engine import Engine
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.engine.text_drafts import TextDrafts
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.settings.speculation_config import SpeculationConfig

TASKS = ("replay", "edit", "free", "repeat")
NUM_PROMPT_TOKENS = 64


class Run(NamedTuple):
    seconds: float
    texts: list[list[int]]


def edited(text: Sequence[int], share: float, vocab_size: int, seed: int) -> list[int]:
    """A text of the same length of which so many tokens, at random places, are others."""
    rng = random.Random(seed)
    result = list(text)
    for i in rng.sample(range(len(text)), round(share * len(text))):
        result[i] = (text[i] + rng.randrange(1, vocab_size)) % vocab_size
    return result


async def generate(engine: Engine, task: str, first: int, batch: int, num_tokens: int) -> Run:
    """A batch at once, timed from the last first token on."""
    first_tokens: list[float] = []

    async def one(number: int) -> list[int]:
        rng = np.random.default_rng(number)
        prompt = rng.integers(
            4, SHAPES[engine.config.served_model_name].vocab_size, NUM_PROMPT_TOKENS
        )
        params = SamplingParams(
            max_new_tokens=num_tokens,
            ignore_eos=True,
            temperature=0.0 if task == "repeat" else 1.0,
            seed=number,
        )
        text = []
        async for event in engine.generate(prompt.tolist(), params):
            if not text:
                first_tokens.append(time.perf_counter())
            text.append(event.token_id)
        return text

    texts = await asyncio.gather(*(one(first + i) for i in range(batch)))
    return Run(time.perf_counter() - max(first_tokens), list(texts))


async def measure(
    engines: tuple[Engine, Engine], source: TextDrafts, task: str, batch: int, options: Any
) -> dict[str, Any]:
    plain, drafting = engines
    ratios, speeds = [], []
    before = drafting.stats().totals
    for number in range(options.rounds):
        first = 1000 * number + 100_000 * batch + TASKS.index(task) * 10_000_000
        off = await generate(plain, task, first, batch, options.tokens)
        vocab_size = SHAPES[options.shape].vocab_size
        for i, text in enumerate(off.texts if task in ("replay", "edit") else ()):
            share = 0.2 if task == "edit" else 0.0
            source.remember(b"", edited(text, share, vocab_size, first + i))
        on = await generate(drafting, task, first, batch, options.tokens)
        assert on.texts == off.texts, "drafts changed a text"
        ratios.append(off.seconds / on.seconds)
        speeds.append(batch * options.tokens / on.seconds)
    after = drafting.stats().totals
    num_drafted = after.num_draft_tokens - before.num_draft_tokens
    num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
    num_tokens = after.num_generated_tokens - before.num_generated_tokens
    return {
        "task": task,
        "batch": batch,
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "tokens_per_s": statistics.median(speeds),
        "tokens_per_step": num_tokens / (num_tokens - num_accepted),
        "drafted_per_token": num_drafted / num_tokens,
        "accepted": num_accepted / max(1, num_drafted),
        "load": os.getloadavg()[0],
    }


async def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    sources: list[TextDrafts] = []

    def note(config: SpeculationConfig) -> TextDrafts:
        sources.append(TextDrafts(config))
        return sources[-1]

    speculation.TextDrafts = note  # type: ignore[misc, assignment]
    quantize = options.dtype if options.dtype in ("int8", "int4") else None

    def engine(drafts: SpeculationConfig | None) -> Engine:
        return Engine(
            EngineConfig(
                model=checkpoint(options.shape),
                served_model_name=options.shape,
                dtype="bf16" if quantize else options.dtype,
                quantize=quantize,
                max_num_seqs=max(options.batches),
                max_model_len=NUM_PROMPT_TOKENS + options.tokens,
                num_threads=options.threads,
                enable_prefix_caching=False,
                repack_cache_dir="none",
                num_models=2,
                speculation=drafts,
            )
        )

    rows = []
    async with engine(None) as plain, engine(SpeculationConfig()) as drafting:
        for each in (plain, drafting):
            await generate(each, "free", 0, 1, 8)
        for task in options.tasks:
            for batch in options.batches:
                row = await measure((plain, drafting), sources[0], task, batch, options)
                rows.append(row)
                print(
                    f"{task:7} batch {batch:3}  x{row['ratio']:.3f} ({row['lowest']:.3f} to "
                    f"{row['highest']:.3f})  {row['tokens_per_s']:8.1f} tokens/s, "
                    f"{row['tokens_per_step']:.2f} a step; {row['drafted_per_token']:.2f} drafted "
                    f"a token, {row['accepted']:.1%} right; load {row['load']:.1f}",
                    flush=True,
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="160m", choices=SHAPES)
    parser.add_argument("--dtype", default="bf16", choices=("fp32", "bf16", "int8", "int4"))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tasks", nargs="+", default=TASKS, choices=TASKS)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = asyncio.run(run(options))
    if options.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
