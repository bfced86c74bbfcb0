"""What the engine refuses of a caller: each fault by its name, before the first token."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import UserError
from lmi_core.settings.engine_config import EngineConfig
from tests.engine.harness import assert_nothing_leaked, collect, make_engine, run, token_ids


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("", SamplingParams(), "must be provided and non-empty"),
        ([], SamplingParams(), "empty"),
        ([1, 999], SamplingParams(), "token id 999 is out of vocabulary; allowed are 0 to 255"),
        (list(range(256)), SamplingParams(), "256 tokens; at most 255"),
        ("x" * 4000, SamplingParams(), "4000 tokens; at most 255"),
        ("a\ud800", SamplingParams(), "valid Unicode at character 1"),
        ([1], SamplingParams(top_p=0.0), "top_p must be above 0"),
        ([1], SamplingParams(logprobs=6), "logprobs must be between 0 and 5"),
        ([1], SamplingParams(repetition_penalty=1e-50), "repetition_penalty must be between 0.001"),
        ([1], SamplingParams(logit_bias=((3, 1e300),)), r"token 3 must be between -1e\+09 and"),
        ([1], SamplingParams(logit_bias=((3, math.nan),)), "logit_bias of token 3"),
        ([1], SamplingParams(logit_bias=((3, -(10**400)),)), "logit_bias of token 3 .* got -1000"),
        ([1], SamplingParams(temperature=10**400), "temperature must be between 0 .* got 1000"),
        ([1], SamplingParams(bad_words_ids=(tuple(range(250)),) * 263), "65750 token ids; at most"),
        (None, SamplingParams(), "a text or a sequence of token ids, got NoneType"),
        (5, SamplingParams(), "a text or a sequence of token ids, got int 5"),
        (b"hi", SamplingParams(), "a text or a sequence of token ids, got bytes"),
        ([1, "a"], SamplingParams(), "a text or a sequence of token ids, got list"),
        ({1: 2}, SamplingParams(), "a text or a sequence of token ids, got dict"),
        ({1, 2}, SamplingParams(), "a text or a sequence of token ids, got set"),
        ([1], {"max_new_tokens": 3}, "params must be SamplingParams, got dict"),
        ([1], SamplingParams(max_new_tokens="3"), "max_new_tokens must be an int, got str '3'"),
        ([1], SamplingParams(max_new_tokens=2.5), "max_new_tokens must be an int, got float"),
        ([1], SamplingParams(n=True), "n must be an int, got bool"),
        ([1], SamplingParams(temperature="hot"), "temperature must be a number, got str 'hot'"),
        ([1], SamplingParams(stop="abc"), "stop must be a tuple of strings, got str 'abc'"),
        ([1], SamplingParams(stop=("a", 5)), "stop must be a tuple of strings, got tuple"),
        ([1], SamplingParams(stop_token_ids=("a",)), "stop_token_ids must hold token ids"),
        ([1], SamplingParams(stop=""), "stop must be a tuple of strings, got str ''"),
        ([1], SamplingParams(stop_token_ids=334), "stop_token_ids must be a tuple of token ids"),
        ([1], SamplingParams(bad_words_ids=(3,)), "bad_words_ids must be a tuple of tuples"),
        ([1], SamplingParams(banned_token_ids=3), "suppress_tokens must be a tuple of token ids"),
        ([1], SamplingParams(ignore_eos="no"), "ignore_eos must be True or False, got str 'no'"),
        ([1], SamplingParams(logit_bias={3: 1.0}), "logit_bias must be a tuple of pairs"),
        ([1], SamplingParams(logit_bias=(3,)), "logit_bias must be pairs"),
        (
            [1],
            SamplingParams(kept_special_tokens=(3,)),
            "kept_special_tokens must be a tuple of",
        ),
        ([1], SamplingParams(thinking=3), "thinking must be a ThinkingBudget or None, got int 3"),
        ([1], SamplingParams(processors=3), "processors must be a LogitsProcessors or None, got"),
        ([1], SamplingParams(logit_bias=((3, "a"),)), "logit_bias of token 3 must be a number"),
        (
            [1],
            SamplingParams(logit_bias=((3, 1.0), (300, 1.0), (999, 1.0))),
            r"\[300, 999\] in logit_bias are out of vocabulary.*Vocabulary size: 256",
        ),
        ([1], SamplingParams(allowed_token_ids=(3, 999)), r"\[999\] in allowed_token_ids"),
        ([1], SamplingParams(allowed_token_ids=()), "allowed_token_ids is empty"),
        ([1], SamplingParams(logprobs=-1), "logprobs must be between 0 and 5.*got 256"),
        ([1], SamplingParams(grammar={"type": "object"}), "grammar must be a Grammar, such as"),
    ],
)
def test_bad_requests_are_refused(prompt: Any, params: Any, message: str) -> None:
    async def main() -> None:
        async with make_engine() as engine:
            with pytest.raises(UserError, match=message):
                await collect(engine, prompt, params)
            await assert_nothing_leaked(engine)

    run(main())


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=10**12, temperature=1.0),
        SamplingParams(max_new_tokens=10**12, min_new_tokens=10**12),
        SamplingParams(max_new_tokens=3, seed=2**64 - 1, temperature=1e-300, top_p=1e-300),
    ],
)
def test_numbers_beyond_those_of_the_native_code_harm_nobody(params: SamplingParams) -> None:
    async def main() -> None:
        async with make_engine() as engine:
            assert await collect(engine, [1, 2], params)
            assert engine.healthy
            await assert_nothing_leaked(engine)

    run(main())


def test_any_text_salts_the_cache() -> None:
    async def main() -> None:
        async with make_engine() as engine:
            params = SamplingParams(max_new_tokens=1)
            prompt = list(range(40))
            request = GenerationRequest(
                request_id="r", prompt_token_ids=tuple(prompt), params=params, cache_salt="\ud800"
            )
            assert await collect(engine, request)
            assert (await collect(engine, request))[0].num_cached_tokens > 0
            assert (await collect(engine, prompt, params))[0].num_cached_tokens == 0

    run(main())


def test_ids_of_another_integer_type_are_ids() -> None:
    params = SamplingParams(max_new_tokens=3)

    async def main() -> None:
        async with make_engine() as engine:
            events = await collect(engine, np.arange(1, 4), params)
            assert token_ids(events) == token_ids(await collect(engine, [1, 2, 3], params))
            for ids in (np.arange(1, 4), [1, 2, 3]):
                fields: dict[str, Any] = {"prompt_token_ids": ids, "params": params}
                request = GenerationRequest(request_id="r", **fields)
                assert token_ids(events) == token_ids(await collect(engine, request))

    run(main())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "give either prompt or prompt_token_ids"),
        ({"prompt": b"hi"}, "prompt is b'hi'; allowed are str, None"),
        ({"prompt_token_ids": ("x",)}, "token ids are ints, not"),
        ({"prompt_token_ids": (1.0, 2)}, r"token ids are ints, not \[1.0, 2\]"),
        ({"prompt_token_ids": [1.5]}, "the prompt must be a text or a sequence of token ids, got"),
        ({"prompt": "a", "cache_salt": None}, "cache_salt is None; allowed are str"),
        ({"prompt": "a", "tenant": 7}, "tenant is 7; allowed are str"),
        ({"prompt": "a", "echo": "no"}, "echo is 'no'; allowed are bool"),
        ({"prompt": "a", "max_queue_s": "1"}, "max_queue_s is '1'; allowed are int, float, None"),
        ({"prompt": "a", "params": None}, "params is None; allowed are SamplingParams"),
        ({"prompt": "a", "priority": "high"}, "priority is 'high'; allowed are int"),
    ],
)
def test_requests_of_wrong_types_are_refused(fields: dict[str, Any], message: str) -> None:
    async def main() -> None:
        async with make_engine() as engine:
            with pytest.raises(UserError, match=message):
                await collect(engine, GenerationRequest(request_id="r", **fields))
            await assert_nothing_leaked(engine)

    run(main())


@pytest.mark.parametrize("request_", ["text", None, [1]])
def test_what_is_no_request_is_refused(request_: Any) -> None:
    async def main() -> None:
        async with make_engine() as engine:
            with pytest.raises(UserError, match="the request must be a GenerationRequest, got"):
                await engine.subscribe(request_, lambda: None)

    run(main())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"device": "tpu"}, "device is 'tpu'; allowed are cpu, cuda, torch-cpu"),
        ({"dtype": "fp16"}, "dtype is 'fp16'; allowed are auto, bf16, fp32"),
        ({"quantize": "hqq"}, "quantize is 'hqq'; allowed are int8, int4, fp8, awq, gptq, "),
        ({"max_model_len": "100"}, "max_model_len is '100'; allowed are int, None"),
        ({"max_num_seqs": True}, "max_num_seqs is True; allowed are int"),
        ({"overlap": 1}, "overlap is 1; allowed are bool"),
        ({"gpu_memory_utilization": "x"}, "gpu_memory_utilization is 'x'; allowed are int, float"),
        ({"model": None}, "model is None; allowed are Path"),
        ({"max_model_len": 0}, "max_model_len is 0, but must be at least 1"),
        ({"seed": -1}, "seed is -1, but must be at least 0"),
    ],
)
def test_configurations_of_wrong_types_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        EngineConfig(**{"model": Path("m"), **fields})


def test_a_model_may_be_named_by_text() -> None:
    assert EngineConfig(model="m").model == Path("m")  # type: ignore[arg-type]
    assert EngineConfig(model=Path("m"), rope_factor=2).rope_factor == 2
