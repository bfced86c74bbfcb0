"""What changes how tokens are chosen: as Transformers has it, or as its own detector sees it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import UserError
from lmi_core.text.watermark import watermark_score
from tests.engine.harness import collect, make_engine, run, token_ids
from tests.engine.test_logits_processors import texts_of
from tests.models.test_parity import oracle_model
from tests.tiny_tokenizer import VOCAB_SIZE

PARAMS = SamplingParams(max_new_tokens=24, ignore_eos=True)
PROMPTS = [[5, 9, 200, 5, 9], list(range(40, 73)), [17]]


@pytest.mark.parametrize(
    "changes",
    [
        {"no_repeat_ngram_size": 1},
        {"no_repeat_ngram_size": 2},
        {"no_repeat_ngram_size": 3},
        {"bad_words_ids": ((7, 8), (4, 5, 10), *((i,) for i in range(0, VOCAB_SIZE, 3)))},
    ],
    ids=lambda changes: f"{next(iter(changes))} {len(str(changes))}",
)
def test_bans_are_those_of_transformers(changes: dict[str, Any]) -> None:
    model = oracle_model("llama3", "float32", "float32")
    asked = {name: [*map(list, v)] if isinstance(v, tuple) else v for name, v in changes.items()}
    got = asyncio.run(texts_of(PROMPTS, replace(PARAMS, **changes)))
    for prompt, text in zip(PROMPTS, got, strict=True):
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=24,
            eos_token_id=None,
            pad_token_id=0,
            **asked,
        )
        assert text == output[0, len(prompt) :].tolist()


def test_bad_words_are_found_at_the_beginning_and_after_a_blank() -> None:
    async def main() -> None:
        async with make_engine() as engine:
            events = await collect(engine, [1, 2, 3], PARAMS)
            [first] = await engine.encode("!")
            banned = replace(PARAMS, bad_words=("!",), max_new_tokens=200)
            assert first not in token_ids(await collect(engine, [1, 2, 3], banned))
            assert len(events) == 24

    run(main())


@pytest.mark.parametrize("gamma", [0.25, 0.5])
def test_the_detector_finds_the_watermark(gamma: float) -> None:
    params = replace(PARAMS, temperature=1.0, seed=3, max_new_tokens=150)
    marked = replace(params, watermark_delta=4.0, watermark_gamma=gamma)
    for asked, low, high in ((params, -4.0, 4.0), (marked, 6.0, 30.0)):
        for prompt, text in zip(PROMPTS, asyncio.run(texts_of(PROMPTS, asked)), strict=True):
            score = watermark_score([prompt[-1], *text], VOCAB_SIZE, gamma)
            assert low < score < high


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size"),
        ({"bad_words": ("a", " ")}, "bad_words"),
        ({"bad_words": "abc"}, "bad_words"),
        ({"bad_words": ("a",) * 1025}, "bad_words"),
        ({"bad_words_ids": ((),)}, "bad_words_ids"),
        ({"bad_words_ids": ((1, 256),)}, "bad_words_ids"),
        ({"watermark_gamma": 1.5}, "watermark_gamma"),
        ({"watermark_delta": float("inf")}, "watermark_delta"),
    ],
)
def test_refusals(changes: dict[str, Any], field: str) -> None:
    async def main() -> None:
        async with make_engine() as engine:
            with pytest.raises(UserError) as raised:
                await collect(engine, [1], replace(PARAMS, **changes))
            assert raised.value.field == field

    run(main())
