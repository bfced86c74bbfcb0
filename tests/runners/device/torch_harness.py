"""Requests to an engine on a torch device, and what came of them elsewhere."""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest

from lmi_core.engine.engine import Engine
from lmi_core.engine.outputs import TokenEvent
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.settings.engine_config import EngineConfig
from tests.engine.harness import assert_nothing_leaked
from tests.tiny_tokenizer import VOCAB_SIZE

LOGPROB_TOLERANCE = 1e-4
DEVICES = ("torch-cpu", pytest.param("cuda", marks=pytest.mark.gpu))
"""Of an engine that isn't the CPU's own."""


def skip_without(device: str) -> None:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")


def config_of(model: Path, device: str, **changes: object) -> EngineConfig:
    settings = {
        "model": model,
        "device": device,
        "dtype": "fp32",
        "max_model_len": 160,
        "block_size": 16,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 48,
        "kv_cache_bytes": 4 << 20,
        "num_threads": 1,
        **changes,
    }
    return EngineConfig(**settings)  # type: ignore[arg-type]


def requests() -> list[tuple[tuple[int, ...], SamplingParams]]:
    """Greedy and sampled, some with a common prefix. Filtered draws agree in distribution only (see
    the sampler's tests), so filters here leave one token."""
    rng = random.Random(7)
    common = SamplingParams(max_new_tokens=8, ignore_eos=True, logprobs=3)
    rules = [
        {},
        {"temperature": 0.8, "seed": 11},
        {"temperature": 1.2, "typical_p": 1e-6, "seed": 12},
        {"temperature": 1.0, "top_p": 1e-6, "seed": 13},
        {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 1.0, "seed": 14},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
        {"logit_bias": ((5, 3.0), (9, -2.0)), "banned_token_ids": (7, 8), "min_new_tokens": 4},
        {"prompt_logprobs": 2, "logprobs": 0},
        {"temperature": 1.0, "n": 2, "seed": 15},
    ]
    prefix = tuple(rng.randrange(4, VOCAB_SIZE) for _ in range(40))
    result = []
    for number, rule in enumerate(rules):
        length = rng.choice([1, 15, 16, 17, 60])
        prompt = tuple(rng.randrange(4, VOCAB_SIZE) for _ in range(length))
        if number % 3 == 0:
            prompt = prefix + prompt[:9]
        result.append((prompt, replace(common, **rule)))  # type: ignore[arg-type]
    return result


async def outcomes(
    config: EngineConfig, adapters: tuple[str, ...] = ("",)
) -> list[list[TokenEvent]]:
    """``adapters``: the requests' in turn."""
    async with Engine(config, check_integrity=True) as engine:

        async def one(
            prompt: tuple[int, ...], params: SamplingParams, adapter: str
        ) -> list[TokenEvent]:
            events = [e async for e in engine.generate(prompt, params, adapter=adapter)]
            return sorted(events, key=lambda event: event.choice)

        wanted = zip(requests(), itertools.cycle(adapters), strict=False)
        results = await asyncio.gather(*(one(*request, adapter) for request, adapter in wanted))
        await assert_nothing_leaked(engine)
    return results


def assert_alike(events: list[TokenEvent], others: list[TokenEvent]) -> None:
    assert [e.token_id for e in events] == [e.token_id for e in others]
    assert [e.text for e in events] == [e.text for e in others]
    for event, other in zip(events, others, strict=True):
        assert event.logprob == pytest.approx(other.logprob, abs=LOGPROB_TOLERANCE)
        assert [top.token_id for top in event.top] == [top.token_id for top in other.top]
        assert [top.logprob for top in event.top] == pytest.approx(
            [top.logprob for top in other.top], abs=LOGPROB_TOLERANCE
        )
        assert (event.prompt is None) == (other.prompt is None)
        if event.prompt is not None and other.prompt is not None:
            assert [p.logprob for p in event.prompt] == pytest.approx(
                [p.logprob for p in other.prompt], abs=LOGPROB_TOLERANCE
            )
