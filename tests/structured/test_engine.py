"""Structured output through the engine: every text follows its grammar, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import random
import re
from typing import Any

import jsonschema
import pytest

from lmi_core.demo import MODEL_DIR
from lmi_core.engine import parts
from lmi_core.engine.engine import Engine
from lmi_core.engine.outputs import FinishReason, TokenEvent
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import UserError
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.structured.grammar import Grammar
from tests.checkpoints import cached_checkpoint
from tests.engine.harness import (
    assert_nothing_leaked,
    collect,
    run,
    text,
)
from tests.engine.random_drafts import (
    SPECULATION,
    draft_at_random,
    draft_whatever_it_costs,
)
from tests.runners.device.torch_harness import DEVICES, skip_without

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 3]}, "minItems": 1, "maxItems": 3},
        "home": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "pattern": "^[A-Z][a-z]{1,6}$"},
                "rooms": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            },
            "required": ["street"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
}
SCHEMAS: list[Any] = [
    PERSON,
    {"type": "array", "items": {"$ref": "#/$defs/p"}, "maxItems": 2, "$defs": {"p": PERSON}},
    {"type": "number", "minimum": -5, "exclusiveMaximum": 12},
    {"anyOf": [{"const": "x"}, {"type": "string", "format": "date"}]},
]


def demo_config(**changes: Any) -> EngineConfig:
    settings = {"max_num_seqs": 32, "kv_cache_bytes": 64 << 20, "num_threads": 1, **changes}
    return EngineConfig(model=MODEL_DIR, **settings)


def tiny_config(**changes: Any) -> EngineConfig:
    settings = {
        "max_num_seqs": 32,
        "max_model_len": 480,
        "kv_cache_bytes": 64 << 20,
        "num_threads": 1,
        "block_size": 16,
        **changes,
    }
    return EngineConfig(model=cached_checkpoint("llama3"), **settings)


def hot(grammar: Grammar | None, seed: int, **changes: Any) -> SamplingParams:
    settings = {"temperature": 1.5, "max_new_tokens": 400, "seed": seed, **changes}
    return SamplingParams(grammar=grammar, **settings)


@pytest.mark.parametrize("make_config", [demo_config, tiny_config])
def test_every_text_is_valid(make_config: Any) -> None:
    async def use() -> None:
        async with Engine(make_config(), check_integrity=True) as engine:
            tasks = [
                collect(engine, "Once", hot(Grammar.json_schema(schema), seed))
                for schema in SCHEMAS
                for seed in range(8)
            ]
            results = await asyncio.gather(*tasks)
            await assert_nothing_leaked(engine)
        assert len({text(events) for events in results}) > 12
        num_complete = 0
        for number, events in enumerate(results):
            if events[-1].finish_reason is FinishReason.LENGTH:
                continue
            assert events[-1].finish_reason is FinishReason.EOS
            num_complete += 1
            value = json.loads(text(events))
            jsonschema.validate(value, SCHEMAS[number // 8])
        assert num_complete > 24

    run(use(), timeout_s=100)


def test_regex_choice_and_free_json() -> None:
    async def use() -> None:
        async with Engine(demo_config(), check_integrity=True) as engine:
            for seed in range(6):
                pattern = r"[a-f]{3,9}(-[0-9]+)?\.(txt|é)"
                params = hot(Grammar.regex(pattern), seed)
                assert re.fullmatch(pattern, text(await collect(engine, "A", params)))
                params = hot(Grammar.choice(["north", "nordic", "south"]), seed)
                assert text(await collect(engine, "A", params)) in ("north", "nordic", "south")
                events = await collect(engine, "A", hot(Grammar.json_object(), seed))
                if events[-1].finish_reason is FinishReason.EOS:
                    assert isinstance(json.loads(text(events)), dict)

    run(use())


def test_a_model_is_ready_with_its_vocabulary_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading it holds the interpreter's lock, which no request may meet."""
    made: list[bool] = []
    real = parts.load_library

    def load(*given: Any, **named: Any) -> Any:
        made.append(is_ready)
        return real(*given, **named)

    monkeypatch.setattr(parts, "load_library", load)
    is_ready = False

    async def use() -> None:
        nonlocal is_ready
        async with Engine(demo_config()) as engine:
            is_ready = True
            await collect(engine, "A", hot(Grammar.regex("[a-z]{3}"), 1))

    run(use())
    assert made == [False]


def outcome(events: list[TokenEvent]) -> list[tuple[int, int, float | None]]:
    return sorted((e.choice, e.num_generated_tokens, e.token_id, e.logprob) for e in events)  # type: ignore[misc]


CONDITIONS: dict[str, dict[str, Any]] = {
    "many at once": {},
    "plain loop": {"overlap": False, "max_num_batched_tokens": 40},
    "two threads": {"num_threads": 2, "max_num_batched_tokens": 64},
    "random drafts": {"num_threads": 2, "speculation": SPECULATION},
    "forced drafts": {"speculation": SPECULATION},
    "few blocks": {"kv_cache_bytes": None},
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_same_request_same_tokens_with_and_without_grammars(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masked rows and rows beside them are what they are alone, to the bit."""
    rng = random.Random(3)
    requests = []
    for number in range(24):
        prompt = [rng.randrange(4, 384) for _ in range(rng.randrange(1, 60))]
        grammar = Grammar.json_schema(SCHEMAS[number % 4]) if number % 3 else None
        params = hot(grammar, number, max_new_tokens=60, logprobs=0, n=1 + number % 2)
        requests.append((prompt, params))

    async def alone() -> list[Any]:
        async with Engine(tiny_config(max_num_seqs=2, enable_prefix_caching=False)) as engine:
            return [outcome(await collect(engine, *request)) for request in requests]

    async def together() -> tuple[list[Any], int]:
        changes = CONDITIONS[name]
        if name == "few blocks":
            from lmi_core import _native

            sizes = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 16}
            block = _native.KvCache.block_bytes(block_size=16, dtype="fp32", **sizes)
            changes = {"kv_cache_bytes": 36 * block}
        async with Engine(tiny_config(**changes), check_integrity=True) as engine:
            results = await asyncio.gather(*(collect(engine, *r) for r in requests))
            await assert_nothing_leaked(engine)
            assert sum(len(events) for events in results) > 1000
            totals = engine.stats().totals
            assert bool(totals.num_accepted_tokens) == ("drafts" in name)
            return [outcome(events) for events in results], totals.num_preemptions

    expected = run(alone(), timeout_s=100)
    if name == "random drafts":
        truths: dict[Any, list[int]] = {}
        for (prompt, params), facts in zip(requests, expected, strict=True):
            for choice, _, token_id, _ in facts:
                truths.setdefault((tuple(prompt), params.seed, choice), []).append(token_id)
        draft_at_random(monkeypatch, truths, 384)
    else:
        draft_whatever_it_costs(monkeypatch)
    got, num_preemptions = run(together(), timeout_s=100)
    for number in range(len(requests)):
        assert got[number] == expected[number], number
    assert (num_preemptions > 0) == (name == "few blocks")


@pytest.mark.parametrize("device", DEVICES)
def test_the_torch_runner_masks_too(device: str) -> None:
    pytest.importorskip("torch", exc_type=ImportError)
    skip_without(device)

    async def use() -> None:
        config = tiny_config(device=device, max_num_seqs=4)
        async with Engine(config, check_integrity=True) as engine:
            pattern = "[a-f]{5}(-[0-9]{2}){2}"
            tasks = [collect(engine, "A", hot(Grammar.regex(pattern), seed)) for seed in range(3)]
            tasks.append(collect(engine, "A", hot(None, 9, max_new_tokens=8)))
            *results, free = await asyncio.gather(*tasks)
            assert len(free) == 8
            assert all(re.fullmatch(pattern, text(events)) for events in results)

    run(use(), timeout_s=60)


def test_a_bad_grammar_is_refused_and_a_slow_one_fails_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = Grammar.regex("(.*a.{12}){1,40}b")

    async def use() -> None:
        async with Engine(demo_config(), check_integrity=True) as engine:
            with pytest.raises(UserError, match="unclosed"):
                await collect(engine, "A", hot(Grammar.regex("[a"), 0))
            good = [collect(engine, "A", hot(Grammar.json_schema(PERSON), i)) for i in range(8)]
            free = [collect(engine, "A", hot(None, i, max_new_tokens=30)) for i in range(8)]
            failing = collect(engine, "A", hot(slow, 1))
            error, *results = await asyncio.gather(failing, *good, *free, return_exceptions=True)
            assert isinstance(error, UserError)
            assert "failed while generating" in str(error)
            assert all(isinstance(events, list) for events in results)
            assert engine.healthy
            await assert_nothing_leaked(engine)

    from lmi_core.structured import guidance

    real = guidance.llguidance.LLParserLimits
    monkeypatch.setattr(
        guidance.llguidance,
        "LLParserLimits",
        lambda **limits: real(**{**limits, "step_lexer_fuel": 3000}),
    )
    run(use(), timeout_s=60)


def test_32_at_once_and_aborts_leave_nothing_behind() -> None:
    async def use() -> None:
        async with Engine(demo_config(), check_integrity=True) as engine:

            async def leave_early(seed: int) -> None:
                grammar = Grammar.json_schema(PERSON) if seed % 2 else None
                num_events = 0
                async for _ in engine.generate("A", hot(grammar, seed, ignore_eos=not grammar)):
                    num_events += 1
                    if num_events > seed % 7:
                        break

            stay = [collect(engine, "A", hot(Grammar.json_schema(PERSON), i)) for i in range(16)]
            await asyncio.gather(*map(leave_early, range(16)), *stay)
            await assert_nothing_leaked(engine)

    run(use(), timeout_s=60)


def test_choices_follow_the_grammar_independently() -> None:
    async def use() -> None:
        async with Engine(demo_config(), check_integrity=True) as engine:
            events = await collect(engine, "A", hot(Grammar.regex("[a-z]{6}"), 4, n=5))
            texts = {text(events, choice) for choice in range(5)}
            assert len(texts) > 1
            assert all(re.fullmatch("[a-z]{6}", one) for one in texts)

    run(use())
