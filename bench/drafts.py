"""What drafts bring: texts that were generated before, edited ones, and ones that nothing is like.

    python -m bench.drafts --shape 160m --dtype bf16 --batches 1 8

An engine that drafts and one that doesn't generate the same requests in turn, round by round; each
figure is the median of the rounds' ratios of their speeds, beside the tokens that a step brought a
sequence and the share of drafts that were right. ``replay``: the text was generated before.
``edit``: so was one of which a fifth of the tokens, at random places, are others. ``free``: nothing
like it was. ``repeat``: greedy texts, which repeat themselves with random weights.

``--draft-layers 2 --loudness 0.1``: drafts are of a draft model as well, which is the first two of
the model's layers; the others add only a tenth of what they would. So the acceptance is made up,
and the time isn't. Random weights give nearly all tokens alike chances, where the same random
number finds another token in a distribution that is a little different: with ``--temperature 0.2``
a text's entropy is that of a language.

The embedded model has tasks of its own (``--shape demo``), batch after batch of requests it knows,
answered greedily: ``copy`` (two to twelve words are to be said again) and ``json`` (an object with
the keys that were asked for, by a schema).
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

from bench.checkpoints import SHAPES, checkpoint, make_draft_pair
from bench.demo.chat import Turn, render_chat
from bench.demo.records import record_task
from bench.demo.repeat import repeat_task
from lmi_core.demo import MODEL_DIR
from lmi_core.engine import speculation
from lmi_core.engine.engine import Engine
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.engine.text_drafts import TextDrafts
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.settings.speculation_config import SpeculationConfig
from lmi_core.structured.grammar import Grammar

TASKS = ("replay", "edit", "free", "repeat")
DEMO, DEMO_TASKS = "demo", ("copy", "json")
NUM_PROMPT_TOKENS = 64
_NUM_DEMO_REQUESTS = 96
_MAX_DEMO_TOKENS = 256


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


Request = tuple[list[int], SamplingParams]


def request(
    shape: str, task: str, number: int, num_tokens: int, temperature: float = 1.0
) -> Request:
    """A random prompt, the same for the same number."""
    rng = np.random.default_rng(number)
    prompt = rng.integers(4, SHAPES[shape].vocab_size, NUM_PROMPT_TOKENS).tolist()
    return prompt, SamplingParams(
        max_new_tokens=num_tokens,
        ignore_eos=True,
        temperature=0.0 if task == "repeat" else temperature,
        seed=number,
    )


def demo_request(engine: Engine, task: str, number: int) -> Request:
    """Of the embedded model's kinds of requests."""
    rng = random.Random(number)
    asked = repeat_task(rng) if task == "copy" else record_task(rng, held_out=False)
    schema = {
        "type": "object",
        "properties": {key: {} for key in asked.keys},
        "required": list(asked.keys),
        "additionalProperties": False,
    }
    text = render_chat([Turn("user", asked.prompt)], generation_prompt=True)
    return engine.tokenizer.encode_now(text, add_special_tokens=False), SamplingParams(
        max_new_tokens=_MAX_DEMO_TOKENS,
        temperature=0.0,
        grammar=Grammar.json_schema(schema) if task == "json" else None,
    )


def distinct(texts: Sequence[Sequence[int]], num: int = 4) -> float:
    """The share of a text's runs of so many tokens that are its first of their kind."""
    runs = [tuple(text[i : i + num]) for text in texts for i in range(len(text) - num + 1)]
    first = sum(len({*zip(*(text[i:] for i in range(num)), strict=False)}) for text in texts)
    return first / max(1, len(runs))


async def generate(engine: Engine, requests: Sequence[Request]) -> Run:
    """A batch at once, timed from the last first token on."""
    first_tokens: list[float] = []

    async def one(prompt: list[int], params: SamplingParams) -> list[int]:
        text: list[int] = []
        async for event in engine.generate(prompt, params):
            if not text:
                first_tokens.append(time.perf_counter())
            text.append(event.token_id)
        return text

    texts = await asyncio.gather(*(one(prompt, params) for prompt, params in requests))
    return Run(time.perf_counter() - max(first_tokens), list(texts))


async def generate_demo(engine: Engine, task: str, first: int, batch: int) -> Run:
    """Batch after batch, and the sum of their times."""
    total = Run(0.0, [])
    for start in range(first, first + _NUM_DEMO_REQUESTS, batch):
        run = await generate(engine, [demo_request(engine, task, start + i) for i in range(batch)])
        total = Run(total.seconds + run.seconds, total.texts + run.texts)
    return total


async def measure(
    engines: tuple[Engine, Engine], source: TextDrafts, task: str, batch: int, options: Any
) -> dict[str, Any]:
    plain, drafting = engines
    ratios, speeds, texts = [], [], []
    before = drafting.stats().totals
    for number in range(options.rounds):
        first = 1000 * number + 100_000 * batch + options.tasks.index(task) * 10_000_000
        if options.shape == DEMO:
            off = await generate_demo(plain, task, first, batch)
            on = await generate_demo(drafting, task, first, batch)
        else:
            requests = [
                request(options.shape, task, first + i, options.tokens, options.temperature)
                for i in range(batch)
            ]
            off = await generate(plain, requests)
            for i, text in enumerate(off.texts if task in ("replay", "edit") else ()):
                share = 0.2 if task == "edit" else 0.0
                vocab_size = SHAPES[options.shape].vocab_size
                source.remember(b"", edited(text, share, vocab_size, first + i))
            on = await generate(drafting, requests)
        assert on.texts == off.texts, "drafts changed a text"
        ratios.append(off.seconds / on.seconds)
        speeds.append(sum(map(len, on.texts)) / on.seconds)
        texts += on.texts
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
        "distinct_4_grams": distinct(texts),
        "load": os.getloadavg()[0],
    }


async def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    sources: list[TextDrafts] = []

    def note(config: SpeculationConfig) -> TextDrafts:
        sources.append(TextDrafts(config))
        return sources[-1]

    speculation.TextDrafts = note  # type: ignore[misc, assignment]
    quantize = options.dtype if options.dtype in ("int8", "int4") else None

    is_demo = options.shape == DEMO
    model, draft = MODEL_DIR, None
    if options.draft_layers:
        model, draft = make_draft_pair(options.shape, options.draft_layers, options.loudness)
    elif not is_demo:
        model = checkpoint(options.shape)
    speculation_config = SpeculationConfig(draft_model=draft, max_draft_tokens=options.depth)

    def engine(drafts: SpeculationConfig | None) -> Engine:
        return Engine(
            EngineConfig(
                model=model,
                served_model_name=options.shape,
                dtype="bf16" if quantize else options.dtype,
                quantize=quantize,
                max_num_seqs=max(options.batches),
                max_model_len=1024 if is_demo else NUM_PROMPT_TOKENS + options.tokens,
                num_threads=options.threads,
                enable_prefix_caching=False,
                repack_cache_dir="none",
                packs_behind=False,
                num_models=2,
                speculation=drafts,
            )
        )

    rows = []
    async with engine(None) as plain, engine(speculation_config) as drafting:
        for each in (plain, drafting) if options.shape != DEMO else ():
            await generate(each, [request(options.shape, "free", 0, 8)])
        for task in options.tasks:
            for batch in options.batches:
                row = await measure((plain, drafting), sources[0], task, batch, options)
                rows.append(row)
                print(
                    f"{task:7} batch {batch:3}  x{row['ratio']:.3f} ({row['lowest']:.3f} to "
                    f"{row['highest']:.3f})  {row['tokens_per_s']:8.1f} tokens/s, "
                    f"{row['tokens_per_step']:.2f} a step; {row['drafted_per_token']:.2f} drafted "
                    f"a token, {row['accepted']:.1%} right; {row['distinct_4_grams']:.0%} distinct "
                    f"4-grams; load {row['load']:.1f}",
                    flush=True,
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="160m", choices=(*SHAPES, DEMO))
    parser.add_argument("--dtype", default="bf16", choices=("fp32", "bf16", "int8", "int4"))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tasks", nargs="+", choices=TASKS + DEMO_TASKS)
    parser.add_argument("--depth", type=int, default=16, help="most drafts of a step")
    parser.add_argument("--draft-layers", type=int, default=0, help="of a draft model")
    parser.add_argument("--loudness", type=float, default=0.0, help="of the other layers")
    parser.add_argument("--temperature", type=float, default=1.0, help="of all but repeat")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.tasks = options.tasks or (DEMO_TASKS if options.shape == DEMO else TASKS)
    rows = asyncio.run(run(options))
    if options.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
