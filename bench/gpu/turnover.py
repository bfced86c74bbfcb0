"""Requests that come and go while others decode, by what they ask for: output tokens per second.

    LMI_OPS=native python -m bench.gpu.turnover --shape qwen2-1.5b --json turnover.json

As many requests as run at once; one ends, the next begins. So steps mix prompts with decode rows,
rows change from step to step, and what sampling, adapters and grammars cost shows beside greedy.
"""

from __future__ import annotations

import asyncio
import random
import re
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.adapters import write_adapter
from bench.checkpoints import write_tokenizer
from bench.gpu.engine import MODEL_OPTIONS, open_engine
from bench.gpu.measure import parse, row_of, write
from bench.gpu.shapes import GPU_SHAPES
from lmi_core.bench.offline import StepLog
from lmi_core.engine.engine import Engine
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.settings.lora_config import LoraConfig
from lmi_core.structured.grammar import Grammar
from lmi_core.text.tokenizer import Tokenizer

RANK = 16
EOS_ID = 1
"""Of ``write_tokenizer``."""
PATTERN = "[a-f]{3}(-[0-9]{2}){1,2}"
PLAIN = SamplingParams(ignore_eos=True)
KINDS = {
    "greedy": PLAIN,
    "drawn": replace(PLAIN, temperature=1.0),
    "top-k, top-p": replace(PLAIN, temperature=1.0, top_k=50, top_p=0.9),
    "penalties, 5 log-probabilities": replace(
        PLAIN, temperature=1.0, repetition_penalty=1.1, frequency_penalty=0.1, logprobs=5
    ),
    "two adapters": PLAIN,
    "a grammar": SamplingParams(temperature=1.0, grammar=Grammar.regex(PATTERN)),
}


@dataclass(frozen=True, slots=True)
class Load:
    num_at_once: int
    num_requests: int
    longest_prompt: int
    longest_output: int
    is_fixed: bool = False
    """Prompts and outputs are all the longest."""

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Tokens of a request's prompt and of its output."""
        if self.is_fixed:
            return self.longest_prompt, self.longest_output
        least = self.longest_output // 4
        return rng.randint(1, self.longest_prompt), rng.randint(least, self.longest_output)


USUAL, TINY = Load(64, 256, 512, 128), Load(2, 6, 20, 12)
LOADS = {"usual": (USUAL, KINDS), "wide": (Load(512, 512, 1000, 1000, True), {"greedy": PLAIN})}


async def turn_over(
    engine: Engine, load: Load, params: SamplingParams, adapters: tuple[str, ...] = ("",)
) -> dict[str, Any]:
    """One row of results; wrong texts are counted."""
    rng, vocab_size = random.Random(0), engine.info.runner.vocab_size
    waiting = []
    for number in range(load.num_requests):
        num_prompt, num_new = load.draw(rng)
        prompt = [rng.randrange(300, vocab_size) for _ in range(num_prompt)]
        waiting.append((prompt, num_new, adapters[number % len(adapters)]))
    num_tokens, texts = 0, []

    async def work() -> None:
        nonlocal num_tokens
        while waiting:
            prompt, num_new, adapter = waiting.pop()
            if params.grammar is not None:  # ends by itself
                num_new = load.longest_output
            asked, text = replace(params, max_new_tokens=num_new), ""
            async for event in engine.generate(prompt, asked, adapter=adapter):
                num_tokens += 1
                text += event.text
            texts.append(text)

    begin = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(load.num_at_once)))
    seconds = time.perf_counter() - begin
    row = {"tokens_per_s": num_tokens / seconds, "num_tokens": num_tokens, "s": seconds}
    if params.grammar is not None:
        row["num_matching"] = sum(re.fullmatch(PATTERN, text) is not None for text in texts)
        row["num_texts"] = len(texts)
    return row


async def measure(arguments: Any) -> list[dict[str, Any]]:
    (load, kinds), rows = LOADS[arguments.load], []
    if arguments.tiny:
        load = replace(TINY, is_fixed=load.is_fixed)
    has_adapters = "two adapters" in kinds
    shape = GPU_SHAPES[arguments.shape]
    with tempfile.TemporaryDirectory() as directory:
        write_tokenizer(Path(directory), shape.vocab_size)
        adapters = [write_adapter(shape, RANK, Path(directory, name)) for name in ("a", "b")]
        engine = open_engine(
            arguments,
            StepLog(),
            Tokenizer.load(Path(directory), vocab_size=shape.vocab_size),
            (EOS_ID,),
            max_num_seqs=load.num_at_once,
            max_model_len=load.longest_prompt + load.longest_output,
            lora=LoraConfig(max_rank=RANK) if has_adapters else None,
            quantize=arguments.quantize,
            kv_dtype=arguments.kv_dtype,
        )
        async with engine:
            print(engine.info.runner, flush=True)
            for path in adapters if has_adapters else ():
                await engine.load_adapter(path.name, path)
            short = replace(
                load,
                longest_prompt=min(load.longest_prompt, USUAL.longest_prompt),
                longest_output=min(load.longest_output, USUAL.longest_output),
            )
            await turn_over(engine, short, PLAIN)  # compiles and captures
            for what, params in kinds.items():
                named = ("a", "b") if what == "two adapters" else ("",)
                rows.append(await row_of(what, turn_over(engine, load, params, named)))
                write(arguments.json, rows)
    return rows


if __name__ == "__main__":
    asyncio.run(
        measure(
            parse(
                __doc__,
                shape={"choices": sorted(GPU_SHAPES), "default": "qwen2-1.5b"},
                load={"choices": sorted(LOADS), "default": "usual"},
                **MODEL_OPTIONS,
            )
        )
    )
