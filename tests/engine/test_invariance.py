"""Same request, same tokens: a request's tokens and log-probabilities are equal to the bit whatever
else the engine is doing, however its prompt is cut into chunks, and whatever the cache holds."""

from __future__ import annotations

import asyncio
import functools
import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from lmi_core import _native
from lmi_core.engine.engine import Engine
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.runners.cpu.cpu_runner import CpuRunner
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.settings.speculation_config import SpeculationConfig
from lmi_core.structured.grammar import Grammar
from tests.checkpoints import cached_checkpoint
from tests.engine.random_drafts import SPECULATION, draft_at_random
from tests.tiny_tokenizer import VOCAB_SIZE

MAX_MODEL_LEN = 480
BLOCK_SIZE = 16
NUM_REQUESTS = 32

RULES = Grammar.regex("([a-f]{1,5} )*[0-9]{150}")
"""Of which texts are cut off, in the midst of what is free."""

Outcome = tuple[tuple[int, float | None, tuple[tuple[int, float], ...]], ...]


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    params: SamplingParams
    adapter: str = ""


def make_requests(seed: int) -> list[Request]:
    """Short and long prompts, some with a common prefix; greedy and sampled; some by a grammar."""
    rng = random.Random(seed)
    prefix = [rng.randrange(4, VOCAB_SIZE) for _ in range(150)]
    requests = []
    for i in range(NUM_REQUESTS):
        length = rng.choice([1, 2, 15, 16, 17, 40, 100, 255, 256, 257, 300])
        prompt = [rng.randrange(4, VOCAB_SIZE) for _ in range(length)]
        if i % 3 == 0:
            prompt = prefix + prompt[:60]
        num_tokens = rng.choice([1, 5, 24, 40, 120])
        sampled = i % 2 == 1
        params = SamplingParams(
            max_new_tokens=num_tokens,
            temperature=rng.choice([0.7, 1.3]) if sampled else 0.0,
            top_k=rng.choice([0, 20]) if sampled else 0,
            top_p=rng.choice([1.0, 0.9]) if sampled else 1.0,
            typical_p=0.8 if i % 6 == 1 else 1.0,
            seed=1000 + i,
            repetition_penalty=1.2 if i % 5 == 0 else 1.0,
            frequency_penalty=0.3 if i % 7 == 0 else 0.0,
            stop_token_ids=tuple(range(i % 5, VOCAB_SIZE, 20)) if i % 9 == 1 else (),
            min_new_tokens=num_tokens // 2 if i % 9 == 1 else 0,
            ignore_eos=True,
            no_repeat_ngram_size=2 if i % 8 == 3 else 0,
            bad_words_ids=tuple((a, a + 1) for a in range(0, VOCAB_SIZE, 3)) if i % 8 == 4 else (),
            watermark_delta=2.0 if i % 8 in (1, 6) else 0.0,
            logprobs=None if i % 4 == 2 else 3,
            grammar=RULES if i % 6 == 5 else None,
        )
        requests.append(Request(tuple(prompt), params))
    return requests


async def outcome(engine: Engine, request: Request) -> Outcome:
    stream = engine.generate(request.prompt, request.params, adapter=request.adapter)
    events = [event async for event in stream]
    return tuple(
        (event.token_id, event.logprob, tuple((top.token_id, top.logprob) for top in event.top))
        for event in events
    )


def config_of(model: Path, dtype: str, **changes: object) -> EngineConfig:
    settings = {
        "model": model,
        "dtype": dtype,
        "max_model_len": MAX_MODEL_LEN,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 32,
        "kv_cache_bytes": 64 << 20,
        "num_threads": 1,
        **changes,
    }
    return EngineConfig(**settings)  # type: ignore[arg-type]


async def alone(
    model: Path,
    dtype: str,
    quantize: str | None,
    kv_dtype: str,
    requests: list[Request],
    num_seqs: int = 1,
    **changes: object,
) -> list[Outcome]:
    """Every request by itself: whole prompts, one thread, no cache."""
    config = config_of(
        model,
        dtype,
        quantize=quantize,
        kv_dtype=kv_dtype,
        max_num_seqs=num_seqs,
        enable_prefix_caching=False,
        **changes,
    )
    async with Engine(config) as engine:
        return [await outcome(engine, request) for request in requests]


async def together(
    config: EngineConfig, requests: list[Request], seed: int, num_disturbing: int = 6
) -> tuple[list[Outcome], Engine]:
    """All requests with random arrivals, beside others that are aborted at random."""
    rng = random.Random(seed)

    async def arrive(request: Request) -> Outcome:
        await asyncio.sleep(rng.random() * 0.05)
        return await outcome(engine, request)

    async def disturb() -> None:
        prompt = [rng.randrange(4, VOCAB_SIZE) for _ in range(rng.randrange(1, 200))]
        params = SamplingParams(max_new_tokens=60, temperature=1.0, ignore_eos=True)
        async for event in engine.generate(prompt, params):
            if event.num_generated_tokens > rng.randrange(1, 40):
                break

    async with Engine(config, check_integrity=True) as engine:
        order = requests[:]
        rng.shuffle(order)
        disturbances = [asyncio.create_task(disturb()) for _ in range(num_disturbing)]
        results = dict(zip(order, await asyncio.gather(*map(arrive, order)), strict=True))
        await asyncio.gather(*disturbances)
    return [results[request] for request in requests], engine


def block_bytes(variant_config: dict[str, int], dtype: str) -> int:
    return _native.KvCache.block_bytes(block_size=BLOCK_SIZE, dtype=dtype, **variant_config)


CONDITIONS = {
    "many at once": {},
    "two threads": {"num_threads": 2},
    "chunks of 1": {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    "chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 5, "num_threads": 2},
    "chunks of 64": {"max_num_batched_tokens": 64},
    "chunks of 512, no prefix cache": {
        "max_num_batched_tokens": 512,
        "enable_prefix_caching": False,
    },
    "plain loop": {"overlap": False, "max_num_batched_tokens": 100},
    "few blocks": {"kv_cache_bytes": None, "max_num_batched_tokens": 300, "num_threads": 2},
}

# Codes know no more of chunks and caches than floats do.
CONDITIONS_OF_CODES = ("many at once", "chunks of 7", "plain loop", "few blocks")

# variant -> sizes of its KV cache
MODELS = {
    "llama3": {"num_layers": 3, "num_kv_heads": 2, "head_dim": 16},
    "mistral": {"num_layers": 3, "num_kv_heads": 2, "head_dim": 32},
    "qwen3": {"num_layers": 3, "num_kv_heads": 2, "head_dim": 32},
}


@pytest.fixture
def steps_ahead(monkeypatch):
    """The steps that were submitted before the last one's tokens were known."""
    steps = []
    submit_ahead = CpuRunner.submit_ahead

    def note(runner, step, logit_rows):
        steps.append(step)
        submit_ahead(runner, step, logit_rows)

    monkeypatch.setattr(CpuRunner, "submit_ahead", note)
    return steps


# variant, dtype, quantize: quantised weights change the linears only, which are alike everywhere.
CASES = [(variant, dtype, None, "auto") for variant in sorted(MODELS) for dtype in ("fp32", "bf16")]
NUM_PLAIN = len(CASES)
CASES += [("llama3", "bf16", "int8", "auto"), ("qwen3", "bf16", "int4", "auto")]
CASES += [("llama3", "bf16", None, "int8"), ("mistral", "fp32", None, "int8")]


@functools.cache
def outcomes_alone(
    variant: str, dtype: str, quantize: str | None, kv_dtype: str
) -> tuple[list[Request], list[Outcome]]:
    requests = make_requests(seed=7)
    model = stored_model(variant, dtype)
    return requests, asyncio.run(alone(model, dtype, quantize, kv_dtype, requests))


def stored_model(variant: str, dtype: str) -> Path:
    return cached_checkpoint(variant, dtype={"fp32": "float32", "bf16": "bfloat16"}[dtype])


def assert_same(
    case: tuple[str, str, str | None, str], name: str, seed: int, **changes: object
) -> Engine:
    """All requests together have the bits that each has alone."""
    variant, dtype, quantize, kv_dtype = case
    requests, expected = outcomes_alone(*case)
    if name == "few blocks":  # a bit more than one longest sequence
        num_blocks = MAX_MODEL_LEN // BLOCK_SIZE + 4
        size = block_bytes(MODELS[variant], dtype if kv_dtype == "auto" else kv_dtype)
        speculation = changes.get("speculation")
        if isinstance(speculation, SpeculationConfig) and speculation.draft_model is not None:
            size *= 2  # of the same shape
        changes = {**changes, "kv_cache_bytes": num_blocks * size}
    config = config_of(
        stored_model(variant, dtype), dtype, quantize=quantize, kv_dtype=kv_dtype, **changes
    )
    got, engine = asyncio.run(together(config, requests, seed=seed))
    for i, request in enumerate(requests):
        assert got[i] == expected[i], (name, i, len(request.prompt))
    return engine


@pytest.mark.parametrize(("variant", "dtype", "quantize", "kv_dtype"), CASES)
def test_bits_do_not_depend_on_company(variant, dtype, quantize, kv_dtype, steps_ahead):
    case = (variant, dtype, quantize, kv_dtype)
    outcomes_alone(*case)
    have_run_ahead = {}
    for number, (name, changes) in enumerate(CONDITIONS.items()):
        if name not in CONDITIONS_OF_CODES and case not in CASES[:NUM_PLAIN]:
            continue
        if name == "chunks of 1" and dtype == "fp32":
            continue  # the longest: each model's in bf16
        steps_ahead.clear()
        totals = assert_same(case, name, number, **changes).stats().totals
        if name == "few blocks":
            assert totals.num_preemptions > 0
        if name == "many at once":
            assert totals.num_cached_tokens > 0
        have_run_ahead[name] = bool(steps_ahead)
    assert not have_run_ahead["plain loop"]
    assert any(have_run_ahead.values())  # which steps do depends on how long they take


@pytest.mark.parametrize(("variant", "dtype", "quantize", "kv_dtype"), CASES[1::2])
def test_bits_do_not_depend_on_drafts(variant, dtype, quantize, kv_dtype, monkeypatch):
    """Neither on those that are right, nor on those that are wrong, whatever else happens."""
    case = (variant, dtype, quantize, kv_dtype)
    requests, expected = outcomes_alone(*case)
    truths = {
        (request.prompt, request.params.seed, 0): [token_id for token_id, *_ in outcome]
        for request, outcome in zip(requests, expected, strict=True)
    }
    draft_at_random(monkeypatch, truths, VOCAB_SIZE)
    for name in ("two threads", "chunks of 7", "plain loop", "few blocks"):
        changes = {**CONDITIONS[name], "speculation": SPECULATION}
        totals = assert_same(case, name, len(name), **changes).stats().totals
        assert 0 < totals.num_accepted_tokens < totals.num_draft_tokens
        assert totals.num_preemptions > 0 or name != "few blocks"


@pytest.mark.parametrize(
    "case", [("llama3", "bf16", None, "auto"), ("qwen3", "fp32", None, "auto")]
)
def test_bits_of_contrastive_search_do_not_depend_on_company(case):
    """Searches beside ordinary requests, which some of them preempt, and cut into chunks."""
    model, rng = stored_model(*case[:2]), random.Random(5)
    searches = [
        Request(
            tuple(rng.randrange(4, VOCAB_SIZE) for _ in range(length)),
            SamplingParams(
                max_new_tokens=14, penalty_alpha=0.6, top_k=top_k, ignore_eos=True, logprobs=2
            ),
        )
        for length, top_k in ((40, 4), (17, 2), (130, 3), (1, 5))
    ]
    requests = searches + outcomes_alone(*case)[0][:10]
    expected = asyncio.run(alone(model, *case[1:], searches, num_seqs=5))
    for name in ("two threads", "chunks of 7", "plain loop", "few blocks"):
        changes = dict(CONDITIONS[name])
        if name == "few blocks":
            size = block_bytes(MODELS[case[0]], case[1])
            changes["kv_cache_bytes"] = (MAX_MODEL_LEN // BLOCK_SIZE + 10) * size
        config = config_of(model, case[1], **changes)
        for seed in range(20):  # until somebody happens to be in the way
            got, engine = asyncio.run(together(config, requests, seed=seed))
            assert got[: len(searches)] == expected, name
            assert got[len(searches) :] == outcomes_alone(*case)[1][:10], name
            if name != "few blocks" or engine.stats().totals.num_preemptions > 0:
                break
        else:
            pytest.fail("nothing was preempted")
