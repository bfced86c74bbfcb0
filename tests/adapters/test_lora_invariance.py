"""Same request, same tokens, with adapters: to the bit, whatever adapters the requests beside it
have, and while others are loaded and unloaded."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from lmi_core.engine.engine import Engine
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.settings.lora_config import LoraConfig
from tests.checkpoints import cached_checkpoint
from tests.engine.random_drafts import SPECULATION, draft_at_random, draft_whatever_it_costs
from tests.engine.test_invariance import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    MODELS,
    Outcome,
    Request,
    alone,
    block_bytes,
    config_of,
    make_requests,
    outcome,
)
from tests.lora_adapters import cached_adapter
from tests.tiny_tokenizer import VOCAB_SIZE

ADAPTERS = ("a", "b")
CONDITIONS: dict[str, dict[str, object]] = {
    "many at once, two threads": {"num_threads": 2},
    "chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 5},
    "plain loop, no prefix cache": {"overlap": False, "enable_prefix_caching": False},
    "with drafts": {"num_threads": 2, "speculation": SPECULATION},
    "few blocks": {"max_num_batched_tokens": 300, "num_threads": 2},
}
CASES = [
    ("llama3", "fp32", None),
    ("mistral", "bf16", None),
    ("llama3", "bf16", "int8"),
    ("qwen3", "bf16", "int4"),
]


def adapters_of(variant: str) -> LoraConfig:
    """Of another rank and other modules each."""
    first = cached_adapter(variant, 1, rank=8)
    second = cached_adapter(variant, 2, rank=5, targets=("q_proj", "v_proj", "up_proj"))
    return LoraConfig(adapters=(("a", first), ("b", second)))


def with_adapters(requests: list[Request]) -> list[Request]:
    """Two of three requests have one; each third prompt begins alike, whatever the adapter."""
    rng = random.Random(1)
    return [replace(request, adapter=rng.choice(["", *ADAPTERS])) for request in requests]


async def together(config: EngineConfig, requests: list[Request], seed: int) -> list[Outcome]:
    """All requests with random arrivals, while a third adapter comes, runs and goes."""
    rng = random.Random(seed)
    assert config.lora is not None
    path = config.lora.adapters[0][1]

    async def arrive(request: Request) -> Outcome:
        await asyncio.sleep(rng.random() * 0.05)
        return await outcome(engine, request)

    async def disturb() -> None:
        for _ in range(4):
            await engine.load_adapter("c", path)
            prompt = [rng.randrange(4, VOCAB_SIZE) for _ in range(rng.randrange(1, 100))]
            params = SamplingParams(max_new_tokens=rng.randrange(1, 20), ignore_eos=True)
            task = asyncio.create_task(outcome(engine, Request(tuple(prompt), params, "c")))
            await asyncio.sleep(rng.random() * 0.02)
            await engine.unload_adapter("c")
            await asyncio.gather(task, return_exceptions=True)

    async with Engine(config, check_integrity=True) as engine:
        order = requests[:]
        rng.shuffle(order)
        disturbance = asyncio.create_task(disturb())
        results = dict(zip(order, await asyncio.gather(*map(arrive, order)), strict=True))
        await disturbance
        totals = engine.stats().totals
        assert bool(totals.num_accepted_tokens) == (config.speculation is not None)
        assert bool(totals.num_model_draft_tokens) == (config.speculation is not None)
        assert bool(totals.num_preemptions) == (config.kv_cache_bytes != 64 << 20)
    return [results[request] for request in requests]


@pytest.mark.parametrize(("variant", "dtype", "quantize"), CASES)
def test_bits_do_not_depend_on_the_adapters_beside(
    variant: str, dtype: str, quantize: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = {"fp32": "float32", "bf16": "bfloat16"}[dtype]
    model = cached_checkpoint(variant, dtype=stored)
    lora = adapters_of(variant)
    requests = with_adapters(make_requests(seed=7))
    expected = asyncio.run(alone(model, dtype, quantize, "auto", requests, lora=lora))
    truths = {
        (request.prompt, request.params.seed, 0): [token_id for token_id, *_ in outcome]
        for request, outcome in zip(requests, expected, strict=True)
    }
    draft_at_random(monkeypatch, truths, VOCAB_SIZE)
    draft_whatever_it_costs(monkeypatch)
    # Codes know no more of threads and loops than floats do.
    names = list(CONDITIONS)[1::2] if quantize else list(CONDITIONS)
    for number, name in enumerate(names):
        changes = CONDITIONS[name]
        if name == "few blocks":  # a bit more than one longest sequence
            num_blocks = MAX_MODEL_LEN // BLOCK_SIZE + 4
            size = num_blocks * block_bytes(MODELS[variant], dtype)
            changes = {**changes, "kv_cache_bytes": size}
        if name == "with drafts":  # of the base model for its adapters
            draft = replace(SPECULATION, draft_model=model)
            changes = {**changes, "speculation": draft}
        config = config_of(model, dtype, quantize=quantize, lora=lora, **changes)
        got = asyncio.run(together(config, requests, seed=number))
        for i, request in enumerate(requests):
            assert got[i] == expected[i], (name, i, request.adapter, len(request.prompt))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_base_model_computes_what_it_does_with_lora_off(dtype: str) -> None:
    model = cached_checkpoint("llama3")
    requests = make_requests(seed=5)[:12]
    on = asyncio.run(alone(model, dtype, None, "auto", requests, lora=adapters_of("llama3")))
    off = asyncio.run(alone(model, dtype, None, "auto", requests))
    assert on == off


def test_adapters_change_what_is_computed() -> None:
    model = cached_checkpoint("llama3")
    request = Request(tuple(range(4, 60)), SamplingParams(max_new_tokens=12, logprobs=1))
    requests = [replace(request, adapter=name) for name in ("", *ADAPTERS)]
    outcomes = asyncio.run(alone(model, "fp32", None, "auto", requests, lora=adapters_of("llama3")))
    assert len(set(outcomes)) == 3
