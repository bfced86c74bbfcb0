"""Numbers at their bounds are served, beyond them refused in the dialect's form, by name."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NamedTuple

import pytest

from lmi_core.text.chat import ChatTemplate
from lmi_server.dialects.tgi.options import TgiOptions
from tests.engine.fake_runner import VOCAB_SIZE, FakeRunner
from tests.server.dialects.tgi.test_tgi_http import serving
from tests.server.harness import Answer

TEMPLATE = ChatTemplate({"default": "{% for m in messages %}{{ m.content }}{% endfor %}"})
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
COMPLETION = {"prompt": "x", "max_tokens": 2}
INPUTS = {"inputs": "x", "parameters": {"max_new_tokens": 2}}
MODEL_LEN = 32
NUM_LOGPROBS = 5
"""Of the runner, so that the most that an API allows isn't asked for."""


class Bound(NamedTuple):
    """Values of a field that are just allowed, and those just beyond."""

    name: str
    good: list[Any]
    bad: list[Any]
    extra: dict[str, Any] = {}


SAMPLED = {"do_sample": True}
MOST_STOPS = [["x" * 16 + str(i) for i in range(800)], ["y" * 16_384], ["z"] * 1024]
TOO_MANY_STOPS = [["y" * 16_385], ["z" * 8192] * 3, ["z"] * 1025]
NEXT_TO_1 = 1.0000000000000002
SHARED = [
    Bound("min_p", [0, 1], [-1e-9, NEXT_TO_1]),
    Bound("typical_p", [1e-9, 1], [0, NEXT_TO_1]),
    Bound("top_k", [-1, 0, 1, 2**31], [-2]),
    Bound("repetition_penalty", [0.001, 100], [0, 100.1]),
    Bound("stop_token_ids", [[0], [VOCAB_SIZE - 1]], [[-1], [VOCAB_SIZE]]),
]
LMI = [
    *(Bound(bound.name, bound.good, bound.bad, SAMPLED) for bound in SHARED),
    Bound("max_new_tokens", [1, MODEL_LEN - 1], [0, -1]),
    Bound("min_tokens", [0, 2], [-1, 3]),
    Bound("temperature", [0, 100], [-0.001, 100.5]),
    Bound("top_p", [1e-9, 1], [0, NEXT_TO_1, -1], SAMPLED),
    Bound("presence_penalty", [-100, 100], [-100.1, 100.1]),
    Bound("frequency_penalty", [-100, 100], [-100.1, 100.1]),
    Bound("seed", [0, 2**64 - 1, "7"], [-1, 2**64, "-1", "x", "9" * 21], SAMPLED),
    Bound("n", [1, 128], [0, 129], SAMPLED),
    Bound("best_of", [2, 128], [0, 1, 129], {**SAMPLED, "n": 2}),
    Bound("top_n_tokens", [0, NUM_LOGPROBS], [-1, NUM_LOGPROBS + 1], {"details": True}),
    Bound("prompt_logprobs", [0, NUM_LOGPROBS], [-1, NUM_LOGPROBS + 1]),
    Bound("truncate", [1, 2**31], [0, -1]),
    Bound("epsilon_cutoff", [0, 1], [-1e-9, NEXT_TO_1], SAMPLED),
    Bound("eta_cutoff", [0, 1], [-1e-9, NEXT_TO_1], SAMPLED),
    Bound("encoder_repetition_penalty", [0.001, 100], [0, 100.1]),
    Bound("exponential_decay_length_penalty", [[0, 100], [9, 0.1]], [[-1, 2], [1, 0], [1]]),
    Bound("stop_sequences", [[], ["x"], *MOST_STOPS], [[""]]),
    Bound("stop", MOST_STOPS, TOO_MANY_STOPS),
]
OPENAI = [
    *SHARED,
    Bound("max_tokens", [1, MODEL_LEN - 1], [0, -1]),
    Bound("min_tokens", [0, 2], [-1, 3]),
    Bound("temperature", [0, 2], [-0.001, 2.001]),
    Bound("top_p", [1e-9, 1], [0, NEXT_TO_1, -1]),
    Bound("presence_penalty", [-2, 2], [-2.001, 2.001]),
    Bound("frequency_penalty", [-2, 2], [-2.001, 2.001]),
    Bound("seed", [-(2**63), 0, 2**63 - 1], []),
    Bound("n", [1, 128], [0, 129, -1]),
    Bound("logit_bias", [{"0": -100}, {str(VOCAB_SIZE - 1): 100}], [{"0": -100.1}, {"0": 101}]),
    Bound("logit_bias", [{}], [{str(VOCAB_SIZE): 1}, {"-1": 1}, {"x": 1}, {"1" * 11: 1}]),
    Bound("stop", [[], ["x"], *MOST_STOPS], ["", *TOO_MANY_STOPS]),
]
COMPLETIONS = [
    *OPENAI,
    Bound("logprobs", [0, NUM_LOGPROBS], [-1, NUM_LOGPROBS + 1]),
    Bound("best_of", [2, 128], [0, 1, 129], {"n": 2}),
    Bound("prompt", [["x"] * 7], [["x"] * 9], {"n": 128, "max_tokens": 1}),
    Bound("prompt", [["x"] * 7], [["x"] * 9], {"best_of": 128, "max_tokens": 1}),
    Bound("prompt", [["x"] * 64, [0, VOCAB_SIZE - 1]], [["x"] * 1025, [-1], [VOCAB_SIZE], []]),
]
CHATS = [
    *OPENAI,
    Bound("max_completion_tokens", [1, MODEL_LEN // 2], [-1]),
    Bound("top_logprobs", [0, NUM_LOGPROBS], [-1, 21], {"logprobs": True}),
]
TGI = [
    Bound("max_new_tokens", [1], [0, MODEL_LEN + 1]),
    Bound("temperature", [0.01, 100], [0, -1]),
    Bound("repetition_penalty", [0.001, 100], [0, -1]),
    Bound("frequency_penalty", [-2, 2], [-2.001, 2.001]),
    Bound("top_p", [0.001, 0.999], [0, 1]),
    Bound("typical_p", [0.001, 0.999], [0, 1]),
    Bound("top_k", [1, 2**31 - 1], [0, -1]),
    Bound("seed", [0, 2**64 - 1], [-1, 2**64], SAMPLED),
    Bound("best_of", [1, 2], [3, -1], SAMPLED),
    Bound("top_n_tokens", [0, NUM_LOGPROBS], [-1, NUM_LOGPROBS + 1]),
    Bound("truncate", [1, MODEL_LEN - 1], [0, MODEL_LEN]),
    Bound("stop", [["x"] * 4], [["x"] * 5]),
]
TABLE: list[tuple[str, str | None, dict[str, Any], list[Bound], int]] = [
    ("/invocations", "parameters", INPUTS, LMI, 424),
    ("/v1/completions", None, COMPLETION, COMPLETIONS, 400),
    ("/v1/chat/completions", None, CHAT, CHATS, 400),
    ("/generate", "parameters", INPUTS, TGI, 422),
]
PROMPTS = Bound("inputs", [["x"] * 256, "x" * (MODEL_LEN - 2)], [["x"] * 257, "", [], [""]])


@pytest.mark.parametrize(("path", "where", "valid", "bounds", "status"), TABLE)
def test_values_at_and_beyond_their_bounds(
    path: str, where: str | None, valid: dict[str, Any], bounds: list[Bound], status: int
) -> None:
    async def run() -> None:
        options: dict[str, Any] = {"tgi": TgiOptions(), "chat_template": TEMPLATE, "api": "lmi"}
        async with serving(FakeRunner(max_model_len=MODEL_LEN), **options) as served:

            async def asked(bound: Bound, value: Any) -> Answer:
                body = json.loads(json.dumps(valid))
                (body if where is None else body[where]).update({**bound.extra, bound.name: value})
                return await served.post(body, path)

            for bound in bounds:
                for value in bound.good:
                    answer = await asked(bound, value)
                    assert answer.status == 200, (bound.name, str(value)[:80], answer.body)
                for value in bound.bad:
                    answer = await asked(bound, value)
                    case = (bound.name, str(value)[:80], answer.status, answer.body[:300])
                    assert answer.status == status, case
                    assert bound.name.encode() in answer.body, case
            assert (await served.post(valid, path)).status == 200

    asyncio.run(run())


def test_prompts() -> None:
    async def run() -> None:
        runner = FakeRunner(max_model_len=MODEL_LEN)
        async with serving(runner, api="lmi", tgi=TgiOptions()) as served:
            for value in PROMPTS.good:
                assert (await served.post({**INPUTS, "inputs": value})).status == 200
            for value in PROMPTS.bad:
                answer = await served.post({**INPUTS, "inputs": value})
                assert (answer.status, b"inputs" in answer.body) == (424, True)
            many = {"parameters": {"max_new_tokens": 1, "do_sample": True, "n": 128}}
            assert (await served.post({**many, "inputs": ["x"] * 7})).status == 200
            answer = await served.post({**many, "inputs": ["x"] * 9})
            assert (answer.status, b"at most 1024 sequences" in answer.body) == (424, True)

    asyncio.run(run())
