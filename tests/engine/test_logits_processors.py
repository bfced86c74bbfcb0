"""Logits processors that are functions of ids and logits: what comes is what Transformers gives."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from lmi_core.engine.engine import Engine
from lmi_core.engine.logits_processors import LogitsProcessors
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import UserError
from lmi_core.settings.speculation_config import SpeculationConfig
from tests.checkpoints import cached_checkpoint
from tests.engine.fake_runner import FakeRunner
from tests.engine.harness import collect, make_engine, run, token_ids
from tests.engine.test_invariance import config_of
from tests.models.test_parity import oracle_model
from tests.tiny_tokenizer import VOCAB_SIZE

PARAMS = SamplingParams(max_new_tokens=24, ignore_eos=True)
PROMPTS = [[5, 9, 200, 5, 9], list(range(40, 73)), [17]]


def of_transformers(prompts: list[list[int]], **asked: Any) -> list[list[int]]:
    model = oracle_model("llama3", "float32", "float32")
    texts = []
    for prompt in prompts:
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=24,
            pad_token_id=0,
            **{"eos_token_id": None, **asked},
        )
        texts.append(output[0, len(prompt) :].tolist())
    return texts


async def texts_of(prompts: list[list[int]], params: SamplingParams, **more: Any) -> Any:
    config = config_of(cached_checkpoint("llama3", dtype="float32"), "fp32", **more)
    async with Engine(config) as engine:
        results = await asyncio.gather(*(collect(engine, p, params) for p in prompts))
    return [token_ids(events) for events in results]


def ours(**asked: Any) -> SamplingParams:
    banned = tuple(asked.pop("suppress_tokens", ()))
    own = {name: asked.pop(name) for name in OWN if name in asked}
    if isinstance(forced := asked.get("forced_eos_token_id"), int):
        asked["forced_eos_token_id"] = (forced,)
    processors = LogitsProcessors(**asked)
    return replace(PARAMS, banned_token_ids=banned, processors=processors, **own)


OWN = (
    "repetition_penalty",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "min_new_tokens",
    "stop_token_ids",
)
EVEN = tuple(range(0, VOCAB_SIZE, 2))


@pytest.mark.parametrize(
    "asked",
    [
        {"suppress_tokens": EVEN},
        {"begin_suppress_tokens": EVEN},
        {"forced_bos_token_id": 33},
        {"forced_bos_token_id": 33, "begin_suppress_tokens": EVEN},
        {"forced_bos_token_id": 17, "encoder_no_repeat_ngram_size": 1},
        {"forced_bos_token_id": 17, "no_repeat_ngram_size": 1},
        {"forced_bos_token_id": 33, "bad_words_ids": [[33], [9]]},
        {"forced_eos_token_id": 44},
        {"forced_eos_token_id": (3, 44)},
        {"encoder_no_repeat_ngram_size": 1},
        {"encoder_repetition_penalty": 3.0},
        {"encoder_repetition_penalty": 0.2, "repetition_penalty": 1.5},
    ],
    ids=lambda asked: ", ".join(f"{name} {str(value)[:4]}" for name, value in asked.items()),
)
def test_what_is_banned_and_forced(asked: dict[str, Any]) -> None:
    plain = {name: list(v) if isinstance(v, tuple) else v for name, v in asked.items()}
    expected = of_transformers(PROMPTS, **plain)
    assert expected != of_transformers(PROMPTS), "it changes nothing"
    assert asyncio.run(texts_of(PROMPTS, ours(**asked))) == expected


def test_ends_that_become_likelier() -> None:
    """Of two ids of a text's end, whose logits have either sign."""
    ends, penalty = [44, 121], (4, 1.3)
    asked = {"exponential_decay_length_penalty": penalty, "repetition_penalty": 1.2}
    plain = of_transformers(PROMPTS, repetition_penalty=1.2, eos_token_id=ends)
    expected = of_transformers(PROMPTS, **asked, eos_token_id=ends)
    params = replace(ours(**asked), stop_token_ids=tuple(ends))
    assert all(len(text) < len(other) for text, other in zip(expected, plain, strict=True))
    for speculation in (None, SpeculationConfig()):
        assert asyncio.run(texts_of(PROMPTS, params, speculation=speculation)) == expected


def biases_of(texts: list[list[int]]) -> tuple[tuple[tuple[int, ...], float], ...]:
    """Of sequences that would come, so that each bias turns the text elsewhere."""
    rng = random.Random(0)
    found: dict[tuple[int, ...], float] = {}
    for prompt, text in zip(PROMPTS, texts, strict=True):
        whole = prompt + text
        for end in range(len(prompt), len(whole)):
            for size in (1, 2, 3, 5):
                if size <= end + 1:
                    ids = tuple(whole[end + 1 - size : end + 1])
                    found.setdefault(ids, round(rng.uniform(-1.0, 0.6), 3))
    return tuple(found.items())


@pytest.mark.parametrize("speculation", [None, SpeculationConfig()])
def test_biases_of_sequences(speculation: SpeculationConfig | None) -> None:
    """With little memory, so that texts are preempted and their last tokens observed anew."""
    plain = of_transformers(PROMPTS)
    biases = biases_of(plain)
    expected = of_transformers(PROMPTS, sequence_bias=[[list(ids), b] for ids, b in biases])
    assert sum(a != b for a, b in zip(expected, plain, strict=True)) >= 2
    few = {"max_model_len": 64, "max_batch_total_tokens": 64, "speculation": speculation}
    assert asyncio.run(texts_of(PROMPTS, ours(sequence_bias=biases), **few)) == expected


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"suppress_tokens": (256,)}, "suppress_tokens"),
        ({"begin_suppress_tokens": (256,)}, "begin_suppress_tokens"),
        ({"forced_bos_token_id": -1}, "forced_bos_token_id"),
        ({"forced_bos_token_id": 3, "suppress_tokens": (3,)}, "forced_bos_token_id"),
        (
            {"forced_bos_token_id": 3, "stop_token_ids": (3,), "min_new_tokens": 2},
            "forced_bos_token_id",
        ),
        ({"forced_eos_token_id": (3, 4), "suppress_tokens": (4, 3)}, "forced_eos_token_id"),
        ({"suppress_tokens": tuple(range(256))}, "suppress_tokens"),
        (
            {"begin_suppress_tokens": EVEN, "suppress_tokens": tuple(range(1, 256, 2))},
            "begin_suppress_tokens",
        ),
        ({"forced_eos_token_id": (300,)}, "forced_eos_token_id"),
        ({"encoder_no_repeat_ngram_size": -1}, "encoder_no_repeat_ngram_size"),
        ({"exponential_decay_length_penalty": (-1, 2.0)}, "exponential_decay_length_penalty"),
        ({"exponential_decay_length_penalty": (1, 0.0)}, "exponential_decay_length_penalty"),
        ({"encoder_repetition_penalty": 0.0}, "encoder_repetition_penalty"),
        ({"epsilon_cutoff": 1.5}, "epsilon_cutoff"),
        ({"eta_cutoff": -0.1}, "eta_cutoff"),
        ({"sequence_bias": (((), 1.0),)}, "sequence_bias"),
        ({"sequence_bias": (((1, 256), 1.0),)}, "sequence_bias"),
        ({"sequence_bias": (((1,), float("nan")),)}, "sequence_bias"),
        ({"sequence_bias": (((1,), 1.0),) * 1025}, "sequence_bias"),
    ],
)
def test_refusals(asked: dict[str, Any], field: str) -> None:
    async def main() -> None:
        async with make_engine() as engine:
            with pytest.raises(UserError) as raised:
                await collect(engine, [1], ours(**asked))
            assert raised.value.field == field

    run(main())


def test_samplers_without_scales_and_cutoffs_refuse_them() -> None:
    async def main() -> None:
        runner = FakeRunner()
        runner.info = replace(runner.info, has_scales_and_cutoffs=False)
        async with make_engine(runner) as engine:
            for name, value in (("epsilon_cutoff", 0.1), ("encoder_repetition_penalty", 2.0)):
                with pytest.raises(UserError, match=f"{name} is not among .*LMI_OPS") as raised:
                    await collect(engine, [1], ours(**{name: value}))
                assert raised.value.field == name
            banned = ours(begin_suppress_tokens=(1, 2))
            assert len(await collect(engine, [1], replace(banned, max_new_tokens=2))) == 2

    run(main())


def test_searches_have_those_that_ban() -> None:
    async def main() -> None:
        async with make_engine() as engine:
            beams = replace(ours(begin_suppress_tokens=(1, 2)), num_beams=2, max_new_tokens=3)
            first = token_ids(await collect(engine, [1], beams))[0]
            assert first not in (1, 2)
            with pytest.raises(UserError, match="forced_eos_token_id doesn't go with num_beams"):
                await collect(engine, [1], replace(ours(forced_eos_token_id=7), num_beams=2))

    run(main())
