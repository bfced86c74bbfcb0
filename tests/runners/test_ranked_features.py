"""What goes with ranks: adapters, drafts, prefixes on a disk, poolings; as in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lmi_core.engine.engine import Engine
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import ModelError
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.settings.lora_config import LoraConfig
from lmi_core.settings.speculation_config import SpeculationConfig
from lmi_core.weights.formats import FloatArray
from tests.checkpoints import cached_checkpoint
from tests.engine.eagle_heads import write_head
from tests.engine.random_drafts import draft_whatever_it_costs
from tests.engine.test_invariance import Outcome, Request, outcome
from tests.engine.test_medusa_heads import write_heads
from tests.engine.test_model_drafts import copy_of_target
from tests.lora_adapters import cached_adapter
from tests.pooled_checkpoints import decoder, encoder
from tests.runners.test_ranks import GREEDY, REQUESTS, SAMPLED, answers, assert_near, config_of

NAMES = ("", "a", "b")
WITH_ADAPTERS = [replace(request, adapter=name) for request in REQUESTS for name in NAMES]


def lora_of(family: str) -> LoraConfig:
    """Of another rank and other modules each."""
    first = cached_adapter(family, 1)
    second = cached_adapter(family, 2, rank=5, targets=("q_proj", "v_proj", "o_proj", "up_proj"))
    return LoraConfig(adapters=(("a", first), ("b", second)))


def test_adapters_are_cut_like_the_weights() -> None:
    config = config_of(cached_checkpoint("llama3"), 1, dtype="fp32", lora=lora_of("llama3"))
    whole = answers(config, WITH_ADAPTERS)
    assert len(set(whole[:3])) == 3
    assert_near(answers(replace(config, tensor_parallel_degree=2), WITH_ADAPTERS), whole)


@pytest.mark.parametrize(("family", "quantize"), [("llama3", None), ("llama_bias", "int8")])
def test_adapters_have_the_same_bits_at_every_degree(family: str, quantize: str | None) -> None:
    def at(degree: int) -> list[Outcome]:
        settings = {"quantize": quantize, "lora": lora_of(family), "dtype": "bf16"}
        config = config_of(cached_checkpoint(family), degree, tp_invariant=True, **settings)
        return answers(config, WITH_ADAPTERS)

    whole = at(1)
    assert at(2) == whole
    assert at(4) == whole


def test_adapters_come_and_go_in_all_ranks(tmp_path: Path) -> None:
    model, path = cached_checkpoint("llama3"), cached_adapter("llama3", 1)
    other = cached_adapter("llama3", 3, rank=4, targets=("o_proj", "down_proj"))
    config = config_of(model, 2, dtype="bf16", lora=LoraConfig())
    request = replace(REQUESTS[1], adapter="x")

    async def main() -> tuple[list[Outcome], list[Outcome]]:
        async with Engine(config, check_integrity=True) as engine:

            async def beside() -> Outcome:
                params = replace(SAMPLED, max_new_tokens=60)
                return await outcome(engine, Request((5, 6, 7), params))

            base = asyncio.create_task(beside())
            with pytest.raises(ModelError, match="adapter_config"):
                await engine.load_adapter("x", tmp_path)
            loads = []
            for directory in (path, other, path):
                await engine.load_adapter("x", directory)
                loads.append(await outcome(engine, request))
                await engine.unload_adapter("x")
            return loads, [await base, await beside()]

    (first, second, again), (disturbed, alone) = asyncio.run(main())
    assert first == again
    assert first != second
    assert disturbed == alone


@pytest.mark.parametrize("kind", ["texts", "model", "medusa", "eagle", "eagle3"])
def test_drafts_change_nothing_but_the_steps(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_whatever_it_costs(monkeypatch)
    makers = {"medusa": write_heads, "eagle": write_head, "eagle3": write_head}
    if kind in makers:
        heads = {} if kind == "medusa" else {"kind": kind}
        drafts_by = makers[kind](tmp_path / "heads", **heads)  # type: ignore[operator]
    else:
        drafts_by = copy_of_target() if kind == "model" else None
    speculation = SpeculationConfig(max_draft_tokens=4, draft_model=drafts_by)
    prompts = [(7, 8, 9) * 12, tuple(range(30, 60))]
    params = replace(GREEDY, max_new_tokens=30)
    requests = [Request(prompt, params) for prompt in prompts]
    requests.append(Request(prompts[0], replace(SAMPLED, temperature=0.5)))
    config = config_of(copy_of_target(), 2, dtype="bf16", max_model_len=128)

    async def drafted() -> tuple[list[Outcome], int]:
        async with Engine(replace(config, speculation=speculation), check_integrity=True) as engine:
            texts = await asyncio.gather(*(outcome(engine, request) for request in requests))
            totals = engine.stats().totals
            by_model = totals.num_model_draft_tokens
            return list(texts), totals.num_draft_tokens if drafts_by is None else by_model

    texts, num_drafted = asyncio.run(drafted())
    assert texts == answers(config, requests)
    assert num_drafted > 0


def test_a_restored_prefix_gives_the_same_bits(tmp_path: Path) -> None:
    prompt = [4 + number * 7 % 50 for number in range(100)]
    params = replace(SAMPLED, max_new_tokens=8)

    def start(degree: int) -> tuple[int, list[object]]:
        config = config_of(cached_checkpoint("llama2"), degree, prefix_cache_dir=tmp_path)

        async def run() -> tuple[int, list[object]]:
            async with Engine(config, check_integrity=True) as engine:
                events = [event async for event in engine.generate(prompt, params)]
            bits = [(event.token_id, event.logprob, event.top) for event in events]
            return events[0].num_cached_tokens, bits

        return asyncio.run(run())

    num_cached, bits = start(2)
    assert num_cached == 0
    assert start(2) == (96, bits)
    assert start(1)[0] == 0
    assert start(2) == (96, bits)


def test_contrastive_search_is_that_of_one_process() -> None:
    params = SamplingParams(
        max_new_tokens=10, penalty_alpha=0.6, top_k=4, logprobs=2, ignore_eos=True
    )
    requests = [Request(tuple(range(40, 73)), params), Request((17,), params)]
    config = config_of(cached_checkpoint("llama3"), 1, dtype="fp32")
    whole = answers(config, requests)
    assert_near(answers(replace(config, tensor_parallel_degree=2), requests), whole)


def vectors(config: EngineConfig, inputs: Sequence[Sequence[int]]) -> list[FloatArray]:
    async def run() -> list[FloatArray]:
        async with Engine(config, check_integrity=True) as engine:
            return list(await asyncio.gather(*(engine.embed(list(ids)) for ids in inputs)))

    return asyncio.run(run())


@pytest.mark.parametrize(
    "model", [lambda: decoder("qwen3"), lambda: encoder("bert"), lambda: encoder("mpnet")]
)
def test_poolings_are_those_of_one_process(model: object) -> None:
    inputs = [range(4, 4 + length) for length in (1, 17, 130)]
    config = config_of(model(), 1, max_model_len=None)  # type: ignore[operator]
    for ours, theirs in zip(
        vectors(replace(config, tensor_parallel_degree=2), inputs),
        vectors(config, inputs),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    invariant = replace(config, dtype="bf16", tp_invariant=True)
    for ours, theirs in zip(
        vectors(replace(invariant, tensor_parallel_degree=2), inputs),
        vectors(invariant, inputs),
        strict=True,
    ):
        assert np.array_equal(ours, theirs)
