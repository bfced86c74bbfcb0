"""What vLLM's server adds to OpenAI's bodies and answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from lmi_core.errors import UserError
from lmi_server.dialects.base import Call
from lmi_server.dialects.openai.openai import parse_completion
from tests.server.dialects.lmi.test_lmi_formats import render
from tests.server.dialects.openai.test_openai_formats import (
    CHAT,
    TEMPLATE,
    TEXT,
    objects,
    parse,
)
from tests.server.harness import serving
from tests.server.parsing import model_of

USAGE = {"include_usage": True, "continuous_usage_stats": True}
BOTH = pytest.mark.parametrize("body", [TEXT, CHAT], ids=["text", "chat"])


def answer(body: dict[str, Any]) -> Any:
    return json.loads(render(parse(body)))


def frames(body: dict[str, Any]) -> list[dict[str, Any]]:
    return objects(render(parse({**body, "stream": True})))


@BOTH
def test_usage_in_every_chunk(body: dict[str, Any]) -> None:
    chunks = frames({**body, "max_tokens": 3, "stream_options": USAGE})
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]
    prompt_tokens = 2 if body is TEXT else 4
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {prompt_tokens}


def test_usage_in_chunks_needs_usage() -> None:
    chunks = frames({**TEXT, "stream_options": {"continuous_usage_stats": True}})
    assert all("usage" not in chunk for chunk in chunks)


def test_token_ids_of_completions() -> None:
    asked = {**TEXT, "max_tokens": 3, "n": 2, "return_token_ids": True}
    assert parse(asked).requests[0].echo
    first, second = answer(asked)["choices"]
    assert (first["token_ids"], first["prompt_token_ids"]) == ([0, 1, 2], [0, 1])
    assert (second["token_ids"], second["prompt_token_ids"]) == ([1, 2, 3], [0, 1])
    choices = [chunk["choices"][0] for chunk in frames(asked)]
    for index, whole in enumerate((first, second)):
        own = [choice for choice in choices if choice["index"] == index]
        assert [i for choice in own for i in choice["token_ids"]] == whole["token_ids"]
        assert [choice.get("prompt_token_ids") for choice in own] == [[0, 1], None, None]


def test_token_ids_of_chats() -> None:
    asked = {**CHAT, "return_token_ids": True}
    whole = answer(asked)
    assert whole["prompt_token_ids"] == [0, 1, 2, 3]
    assert whole["choices"][0]["token_ids"] == [0, 1]
    chunks = frames(asked)
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[0], [1]]
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [[0, 1, 2, 3], None]


def test_token_ids_beside_tools() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    chunks = frames({**CHAT, "max_tokens": 4, "tools": tools, "return_token_ids": True})
    ids = [i for chunk in chunks for i in chunk["choices"][0]["token_ids"]]
    assert ids == [0, 1, 2, 3]


@BOTH
def test_ids_are_absent_unless_asked_for(body: dict[str, Any]) -> None:
    whole = answer(body)
    assert not {"token_ids", "prompt_token_ids"} & {*whole, *whole["choices"][0]}


def test_tokens_named_by_their_ids() -> None:
    asked = {"return_tokens_as_token_ids": True, "max_tokens": 2}
    [choice] = answer({**TEXT, **asked, "logprobs": 1})["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:0", "token_id:1"]
    assert choice["logprobs"]["top_logprobs"][1] == {"token_id:1": -0.5}
    [choice] = answer({**CHAT, **asked, "logprobs": True, "top_logprobs": 2})["choices"]
    first = choice["logprobs"]["content"][0]
    assert (first["token"], bytes(first["bytes"])) == ("token_id:0", b" a")
    assert [top["token"] for top in first["top_logprobs"]] == ["token_id:0", "token_id:1"]


@BOTH
def test_prompt_logprobs(body: dict[str, Any]) -> None:
    request = parse({**body, "prompt_logprobs": 2}).requests[0]
    assert (request.params.prompt_logprobs, request.echo) == (2, True)
    whole = answer({**body, "prompt_logprobs": 2})
    scores = (whole["choices"][0] if body is TEXT else whole)["prompt_logprobs"]
    word = "is" if body is TEXT else "Hi"
    assert scores[:2] == [None, {"1": {"logprob": -1.5, "rank": 4, "decoded_token": word}}]


def test_prompt_logprobs_beside_those_of_an_echo() -> None:
    asked = {**TEXT, "echo": True, "logprobs": 3}
    assert parse({**asked, "prompt_logprobs": 1}).requests[0].params.prompt_logprobs == 3
    assert parse({**asked, "prompt_logprobs": -1}).requests[0].params.prompt_logprobs == -1


@BOTH
@pytest.mark.parametrize(
    ("asked", "field", "message"),
    [
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
        ({"prompt_logprobs": -2}, "prompt_logprobs", "at least -1"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "empty"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "at least -1"),
        ({"seed": 2**64}, "seed", str(2**64 - 1)),
        ({"seed": -(2**63) - 1}, "seed", str(-(2**63))),
        ({"logit_bias": {"x": 1, "7": 1, "-1": 2}}, "logit_bias", "'x', '-1'"),
    ],
    ids=str,
)
def test_refusals(body: dict[str, Any], asked: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse({**body, **asked})
    assert caught.value.field == field
    assert message in str(caught.value)


@BOTH
def test_allowed_token_ids_reach_the_engine(body: dict[str, Any]) -> None:
    params = parse({**body, "allowed_token_ids": [9, 3, 9]}).requests[0].params
    assert params.allowed_token_ids == (3, 9)


def test_the_whole_vocabulary_of_log_probabilities() -> None:
    params = parse({**CHAT, "logprobs": True, "top_logprobs": -1}).requests[0].params
    assert params.logprobs == -1
    assert params.counted(50).logprobs == 50
    params.validate(vocab_size=20, max_logprobs=20)
    with pytest.raises(UserError, match="logprobs must be between 0 and 20, got 50"):
        params.validate(vocab_size=50, max_logprobs=20)


ASSISTANT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "He is"}]


def test_echo_of_the_last_message() -> None:
    asked = {**CHAT, "messages": ASSISTANT, "echo": True}
    assert answer(asked)["choices"][0]["message"]["content"] == "He is a fox"
    chunks = frames(asked)
    assert [chunk["choices"][0]["delta"]["content"] for chunk in chunks] == ["He is a", " fox"]
    assert answer({**CHAT, "echo": True})["choices"][0]["message"]["content"] == " a fox"


def test_suffix() -> None:
    vocabulary = {"<fim_prefix>": 1, "<fim_suffix>": 2, "<fim_middle>": 3}
    model = model_of(token_id=vocabulary.get)

    def prompt_of(body: dict[str, Any]) -> str | None:
        call = Call(request_id="r", body=json.dumps(body).encode())
        return parse_completion(model, call).requests[0].prompt

    asked = {"prompt": "a = {", "suffix": "}\n"}
    assert prompt_of(asked) == "<fim_prefix>a = {<fim_suffix>}\n<fim_middle>"
    with pytest.raises(UserError, match="as text") as caught:
        prompt_of({**asked, "prompt": [1, 2]})
    assert caught.value.field == "suffix"
    vocabulary.clear()
    with pytest.raises(UserError, match="no tokens for that") as caught:
        prompt_of(asked)
    assert caught.value.field == "suffix"


def test_developer_messages_are_the_systems() -> None:
    messages = [{"role": "developer", "content": "Be brief"}]
    assert "system: Be brief" in TEMPLATE.render(messages)


def test_truncated_prompts() -> None:
    async def run() -> None:
        async with serving(chat_template=TEMPLATE) as served:
            for prompt, count, kept in (
                ("a b c", 2, (2, 3)),
                ([4, 5, 6], 2, (5, 6)),
                ([4, 5, 6], -1, (4, 5, 6)),
            ):
                asked = {"prompt": prompt, "max_tokens": 1, "truncate_prompt_tokens": count}
                assert (await served.post(asked, "/v1/completions")).status == 200
                assert served.engine.requests[-1].prompt_token_ids == kept
            served.engine.max_model_len = 4
            asked = {"prompt": [1] * 9, "max_tokens": 1, "truncate_prompt_tokens": -1}
            assert (await served.post(asked, "/v1/completions")).status == 200
            assert served.engine.requests[-1].prompt_token_ids == (1, 1, 1)

    asyncio.run(run())
