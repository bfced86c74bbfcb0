"""Answers of configurations without a rolling batch (djl_python/huggingface.py)."""

import asyncio
import json

import pytest

from lmi_core.config.resolve import resolve
from lmi_core.config.targets.launch import prepare
from lmi_server.models.loading import build_options
from tests.checkpoints import cached_checkpoint
from tests.config.cases import CPU, NO_CACHE
from tests.server.harness import serving

INPUTS = {"inputs": ["a b", "c"], "parameters": {"max_new_tokens": 2}}


def options_of(*settings):
    argv = [str(cached_checkpoint("llama2")), *(a for s in settings for a in ("-o", s))]
    (launch,) = prepare(resolve(argv, NO_CACHE, CPU), NO_CACHE)
    return build_options(launch).lmi


def ask(body, *settings):
    async def run():
        async with serving(lmi=options_of(*settings)) as served:
            answer = await served.post(body)
            return answer, served.engine.requests

    return asyncio.run(run())


def test_answers_without_a_rolling_batch():
    rolling, _ = ask(INPUTS)
    answer, _ = ask(INPUTS, "rolling_batch=disable")
    first, second = (one["generated_text"] for one in json.loads(rolling.body))
    one, two = (f'  {{\n    "generated_text":"{t}"\n  }}' for t in (f"a b{first}", f"c{second}"))
    assert answer.body.decode() == f"[\n{one},\n{two}\n]"
    single = {"inputs": "a b", "parameters": {"max_new_tokens": 2, "return_full_text": False}}
    answer, _ = ask(single, "rolling_batch=disable")
    assert json.loads(answer.body) == [{"generated_text": first}]


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ((), 30),
        (("rolling_batch=disable",), 20),
        (("rolling_batch=disable", "enable_streaming=true"), 50),
        (("rolling_batch=disable", "async_mode=true"), 30),
        (("enable_streaming=true",), 30),
    ],
)
def test_tokens_of_requests_that_do_not_say_it(settings, tokens):
    _, requests = ask({"inputs": "a"}, *settings)
    assert requests[0].params.max_new_tokens == tokens


@pytest.mark.parametrize(("mode", "has_prompts"), [("true", False), ("huggingface", True)])
def test_streams_without_a_rolling_batch(mode, has_prompts):
    texts = [one["generated_text"] for one in json.loads(ask(INPUTS)[0].body)]
    answer, _ = ask(INPUTS, "rolling_batch=disable", f"enable_streaming={mode}")
    assert answer.headers["Content-Type"] == "application/jsonlines"
    lines = [json.loads(line)["outputs"] for line in answer.body.splitlines()]
    assert len(lines) == 2 + has_prompts
    if has_prompts:
        assert lines.pop(0) == INPUTS["inputs"]
    assert ["".join(pieces) for pieces in zip(*lines, strict=True)] == texts
    refused, _ = ask(
        {"inputs": "a", "parameters": {"n": 2, "do_sample": True}},
        *("rolling_batch=disable", f"enable_streaming={mode}"),
    )
    assert refused.status == 424
