"""Everything that a request can ask for at once, with each kind of drafts: what comes is what comes
without."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lmi_core import _native
from lmi_core.engine.engine import Engine
from lmi_core.engine.logits_processors import LogitsProcessors
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.settings.lora_config import LoraConfig
from lmi_core.settings.speculation_config import SpeculationConfig
from lmi_core.structured.grammar import Grammar
from tests.engine.draft_models import near_copy
from tests.engine.eagle_heads import write_head as write_eagle
from tests.engine.harness import run
from tests.engine.random_drafts import draft_whatever_it_costs
from tests.engine.test_medusa_heads import write_heads
from tests.engine.test_model_drafts import TARGET, copy_of_target
from tests.lora_adapters import cached_adapter
from tests.tiny_tokenizer import VOCAB_SIZE

MAX_LEN, BLOCK_SIZE = 240, 16
GRAMMARS = (
    Grammar.regex("([a-f]+ )*[0-9]{60}"),
    Grammar.regex("[a-c]{1,30}"),
    Grammar.json_schema({"type": "object", "properties": {"n": {"type": "integer"}}}),
)
NO_CACHE: dict[str, Any] = {"enable_prefix_caching": False}
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "text": (8, {}),
    "copy": (4, NO_CACHE),
    "near": (1, {"overlap": False}),
    "eagle3": (3, {"num_blocks": 24}),
    "eagle": (8, {"max_num_batched_tokens": 16, "num_threads": 2}),
    "medusa": (2, {"num_blocks": 20}),
}
"""Of drafts: how many tokens at most, and what else is special."""


class Asked(NamedTuple):
    prompt: tuple[int, ...]
    params: SamplingParams
    adapter: str


def special(kind: str, rng: random.Random, num_new: int) -> dict[str, Any]:
    match kind:
        case "stops":
            texts = tuple(rng.sample(["a", "e", "th", " ", "qz", "1", "ab"], 2))
            return {"stop": texts, "include_stop": rng.random() < 0.5}
        case "choices":
            return {"n": 3, "temperature": 0.9}
        case "beams":
            return {"num_beams": 2, "temperature": 0.0, "logprobs": None}
        case "grammar":
            return {"grammar": rng.choice(GRAMMARS), "ignore_eos": False, "n": rng.choice([1, 2])}
        case "penalties":
            return {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "watermark_delta": 1.0}
        case "bans":
            words = tuple((a, a + 1) for a in range(0, VOCAB_SIZE, 5))
            return {"no_repeat_ngram_size": 2, "bad_words_ids": words}
        case "processors":
            biases = tuple(((a, (a * 7) % VOCAB_SIZE), 3.0) for a in range(4, VOCAB_SIZE))
            return {
                "processors": LogitsProcessors(
                    begin_suppress_tokens=tuple(range(0, VOCAB_SIZE, 2)),
                    forced_eos_token_id=(5,),
                    encoder_no_repeat_ngram_size=2,
                    sequence_bias=biases if rng.random() < 0.5 else (),
                )
            }
        case "scales":
            ends = tuple(range(0, VOCAB_SIZE, 11))
            processors = LogitsProcessors(
                exponential_decay_length_penalty=(num_new // 4, 1.05),
                encoder_repetition_penalty=1.4,
                epsilon_cutoff=0.002,
                eta_cutoff=0.004,
            )
            return {"processors": processors, "stop_token_ids": ends, "repetition_penalty": 1.1}
        case "scores":
            return {"prompt_logprobs": 1}
        case "least":
            ids = tuple(range(0, VOCAB_SIZE, 9))
            return {"min_new_tokens": num_new // 2, "stop_token_ids": ids}
        case "search":
            return {"penalty_alpha": 0.6, "top_k": 2, "temperature": 0.0, "max_new_tokens": 9}
    return {}


SPECIALS = (
    *("", "stops", "choices", "beams", "grammar", "penalties"),
    *("bans", "processors", "scales", "scores", "least"),
)


def asked(seed: int, num: int = 22) -> list[Asked]:
    rng = random.Random(seed)
    prefix = [rng.randrange(4, VOCAB_SIZE) for _ in range(100)]
    requests = []
    for i in range(num):
        prompt = [rng.randrange(4, VOCAB_SIZE) for _ in range(rng.choice([1, 15, 16, 33, 64]))]
        if i % 3 == 0:
            prompt = prefix[: rng.choice([16, 48, 96])] + prompt[:30]
        num_new = rng.choice([1, 2, 17, 40, 80])
        params: dict[str, Any] = {
            "max_new_tokens": num_new,
            "temperature": rng.choice([0.0, 0.2, 0.8, 1.3]),
            "seed": i,
            "ignore_eos": True,
            "logprobs": rng.choice([None, 2]),
        }
        kind = "search" if i == 11 else SPECIALS[i % len(SPECIALS)]
        params |= special(kind, rng, num_new)
        adapter = rng.choice(["", "a", "b"])
        requests.append(Asked(tuple(prompt), SamplingParams(**params), adapter))
    return requests


async def given(engine: Engine, request: Asked, most: int = 1000) -> dict[int, list[Any]]:
    """Events by choice; after the ``most``-th, the reader leaves."""
    events: dict[int, list[Any]] = {}
    stream = engine.generate(request.prompt, request.params, adapter=request.adapter)
    async for event in stream:
        top = tuple((each.token_id, each.logprob) for each in event.top)
        prompt = event.prompt and [(each.token_id, each.logprob) for each in event.prompt]
        events.setdefault(event.choice, []).append(
            (event.token_id, event.text, event.logprob, top, event.finish_reason, prompt)
        )
        if sum(map(len, events.values())) >= most:
            await stream.aclose()
            break
    return events


def config_of(speculation: SpeculationConfig | None, **changes: Any) -> EngineConfig:
    first = cached_adapter("llama3", 1, rank=8)
    second = cached_adapter("llama3", 2, rank=5, targets=("q_proj", "v_proj", "up_proj"))
    size = _native.KvCache.block_bytes(
        block_size=BLOCK_SIZE, dtype="bf16", num_layers=3, num_kv_heads=2, head_dim=16
    )
    if speculation is not None and speculation.draft_model is not None:
        size *= 2  # enough for the draft's cache
    settings: dict[str, Any] = {
        "max_model_len": MAX_LEN,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 12,
        "num_threads": 1,
        "kv_cache_bytes": changes.pop("num_blocks", 2000) * size,
        "lora": LoraConfig(adapters=(("a", first), ("b", second))),
        **changes,
    }
    return EngineConfig(model=copy_of_target(), speculation=speculation, **settings)


async def together(config: EngineConfig, requests: list[Asked], seed: int) -> list[Any]:
    """All of them at about the same time, beside readers who leave in the midst of drafts; then
    the first ones once more."""
    rng = random.Random(seed)

    async def one(request: Asked) -> Any:
        await asyncio.sleep(rng.random() * 0.1)
        return await given(engine, request)

    async def leave() -> None:
        for _ in range(8):
            await given(engine, rng.choice(requests), rng.randrange(1, 12))

    async with Engine(config, check_integrity=True) as engine:
        leaving = [asyncio.create_task(leave()) for _ in range(2)]
        got = await asyncio.gather(*map(one, requests))
        await asyncio.gather(*leaving)
        got += [await given(engine, request) for request in requests[:5]]
        # On a busy machine others may have left no row for a head's drafts.
        fresh = tuple(rng.randrange(4, VOCAB_SIZE) for _ in range(40))
        params = SamplingParams(max_new_tokens=24, ignore_eos=True)
        await given(engine, Asked(fresh, params, ""))
        stats = engine.stats()
        assert stats.num_used_blocks == 0
        assert stats.totals.num_draft_tokens > 0
        if config.speculation is not None and config.speculation.draft_model is not None:
            assert stats.totals.num_model_draft_tokens > 0
    return got


@pytest.fixture(scope="module")
def requests_and_truth() -> tuple[list[Asked], list[Any]]:
    requests = asked(3)

    async def alone() -> list[Any]:
        async with Engine(config_of(None, max_num_seqs=4, **NO_CACHE)) as engine:
            return [await given(engine, request) for request in requests]

    return requests, run(alone(), 60)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_changes(
    kind: str,
    requests_and_truth: tuple[list[Asked], list[Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draft_whatever_it_costs(monkeypatch)
    requests, truth = requests_and_truth
    num_tokens, changes = KINDS[kind]
    match kind:
        case "text":
            draft = None
        case "copy":
            draft = copy_of_target()
        case "near":
            draft = near_copy(*TARGET)
        case "medusa":
            draft = write_heads(tmp_path / kind)
        case _:
            draft = write_eagle(tmp_path / kind, kind)
    speculation = SpeculationConfig(draft_model=draft, max_draft_tokens=num_tokens)
    got = run(together(config_of(speculation, **changes), requests, len(kind)), 60)
    for i, (found, expected) in enumerate(zip(got, truth + truth[:5], strict=True)):
        assert found == expected, (i, requests[i % len(requests)])
