"""Several choices and the prompt's log-probabilities are equal to the bit, whether forked from a
sibling, continued from the prefix cache or computed anew, in one chunk or many, preempted or not.
"""

from __future__ import annotations

import asyncio
import functools
import random
from pathlib import Path
from typing import Any

import pytest

from lmi_core import _native
from lmi_core.engine.engine import Engine
from lmi_core.engine.outputs import TokenEvent, TokenLogprob
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.settings.engine_config import EngineConfig
from tests.checkpoints import cached_checkpoint
from tests.engine.harness import run
from tests.engine.random_drafts import SPECULATION, draft_at_random
from tests.tiny_tokenizer import VOCAB_SIZE

BLOCK_BYTES = _native.KvCache.block_bytes(
    num_layers=3, block_size=16, num_kv_heads=2, head_dim=16, dtype="bf16"
)
VARIANTS: dict[str, dict[str, Any]] = {
    "all at once": {"max_num_seqs": 32, "num_threads": 2},
    "chunks of 1": {"max_num_seqs": 1, "max_num_batched_tokens": 1},
    "chunks of up to 9": {"max_num_seqs": 6, "max_num_batched_tokens": 9},
    "without prefix cache": {"max_num_seqs": 16, "enable_prefix_caching": False},
    "with drafts": {"max_num_seqs": 32, "num_threads": 2, "speculation": SPECULATION},
    "preempted": {"max_num_seqs": 32, "kv_cache_bytes": 26 * BLOCK_BYTES},
}
Fact = tuple[object, ...]


def random_requests() -> list[GenerationRequest]:
    rng = random.Random(7)
    stem = [rng.randrange(4, VOCAB_SIZE) for _ in range(250)]
    requests = []
    for i in range(12):
        prompt = stem[: rng.choice([0, 16, 40, 96, 250])]
        prompt = prompt + [rng.randrange(4, VOCAB_SIZE) for _ in range(rng.randint(1, 40))]
        params = SamplingParams(
            max_new_tokens=rng.choice([1, 10, 50]),
            ignore_eos=True,
            temperature=rng.choice([0.8, 1.5]),
            min_p=rng.choice([0.0, 0.05]),
            typical_p=rng.choice([1.0, 0.9]),
            presence_penalty=rng.choice([0.0, 0.5]),
            seed=i,
            n=rng.choice([2, 4]),
            logprobs=1,
            prompt_logprobs=rng.choice([None, 2]),
        )
        requests.append(
            GenerationRequest(request_id=str(i), prompt_token_ids=tuple(prompt), params=params)
        )
    return requests


def engine_with(path: Path, **changes: Any) -> Engine:
    settings: dict[str, Any] = {"num_threads": 1, "block_size": 16, "max_model_len": 352} | changes
    return Engine(EngineConfig(model=path, dtype="bf16", **settings), check_integrity=True)


async def answer(engine: Engine, request: GenerationRequest) -> dict[int, list[Fact]]:
    facts: dict[int, list[Fact]] = {}
    async for event in engine.generate(request):
        facts.setdefault(event.choice, []).append(facts_of(event))
    return facts


def facts_of(event: TokenEvent) -> Fact:
    prompt = [(token.token_id, token.logprob, pairs(token.top)) for token in event.prompt or ()]
    return (event.token_id, event.text, event.logprob, pairs(event.top), prompt)


def pairs(top: tuple[TokenLogprob, ...]) -> list[tuple[int, float]]:
    return [(entry.token_id, entry.logprob) for entry in top]


@functools.cache
def answers_alone(path: Path) -> list[dict[int, list[Fact]]]:
    async def main() -> list[dict[int, list[Fact]]]:
        async with engine_with(path, max_num_seqs=4, enable_prefix_caching=False) as engine:
            return [await answer(engine, request) for request in random_requests()]

    return run(main(), timeout_s=100)


@pytest.mark.parametrize("variant", VARIANTS)
def test_choices_do_not_depend_on_circumstances(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cached_checkpoint("llama3")
    expected = answers_alone(path)
    truths = {
        (request.prompt_token_ids, request.params.seed, choice): [
            fact[0] for fact in facts if not fact[-1]
        ]
        for request, answer in zip(random_requests(), expected, strict=True)
        for choice, facts in answer.items()
    }
    draft_at_random(monkeypatch, truths, VOCAB_SIZE)

    async def main() -> int:
        async with engine_with(path, **VARIANTS[variant]) as engine:
            requests = random_requests()
            answers = await asyncio.gather(*(answer(engine, request) for request in requests))
            for request, alone, together in zip(requests, expected, answers, strict=True):
                assert len(together) == request.params.n
                assert together == alone, request
            stats = engine.stats()
            assert stats.num_used_blocks == 0
            assert bool(stats.totals.num_accepted_tokens) == (variant == "with drafts")
            return stats.totals.num_preemptions

    assert (run(main(), timeout_s=100) > 0) == (variant == "preempted")
