"""Structured output over HTTP in every protocol, with the demo model."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import jsonschema
import pytest

from lmi_core.demo import MODEL_DIR
from lmi_core.engine.engine import Engine
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.structured import library
from lmi_core.text.chat import ChatTemplate
from lmi_core.tools.reasoning import REASONING
from lmi_server.http.metrics import Metrics
from tests.engine.harness import assert_nothing_leaked
from tests.server.configured import configured
from tests.server.harness import Answer, Served, serving_backend

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"type": "integer", "minimum": 1, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 2},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}
REGEX = "[a-f]{3}-[0-9]{2}"
MESSAGES = [{"role": "user", "content": "Go"}]
HOT = {"temperature": 1.5, "max_tokens": 120}


@asynccontextmanager
async def serving_demo(**options: Any) -> AsyncIterator[Served]:
    config = EngineConfig(model=MODEL_DIR, num_threads=1, kv_cache_bytes=32 << 20)
    metrics = Metrics()
    options = {"chat_template": ChatTemplate.load(MODEL_DIR), **options}
    async with (
        Engine(config, observer=metrics.observer("model"), check_integrity=True) as engine,
        serving_backend(engine, metrics, **options) as served,
    ):
        yield served
        await assert_nothing_leaked(engine)


def run(use: Callable[[Served], Awaitable[None]], **options: Any) -> None:
    async def serve() -> None:
        async with serving_demo(**options) as served:
            await use(served)

    asyncio.run(serve())


def loaded(answer: Answer) -> Any:
    assert answer.status == 200, answer.body
    return json.loads(answer.body)


def error_of(answer: Answer) -> Any:
    assert answer.status >= 400
    return json.loads(answer.body)["error"]


def test_openai() -> None:
    form = {
        "type": "json_schema",
        "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True},
    }

    async def use(served: Served) -> None:
        for seed in range(4):
            body = {"messages": MESSAGES, "response_format": form, "seed": seed, **HOT}
            chat = loaded(await served.post(body, "/openai/v1/chat/completions"))
            jsonschema.validate(json.loads(chat["choices"][0]["message"]["content"]), SCHEMA)
            assert chat["choices"][0]["finish_reason"] == "stop"
        body = {"messages": MESSAGES, "response_format": {"type": "json_object"}, "n": 3, **HOT}
        for choice in loaded(await served.post(body, "/openai/v1/chat/completions"))["choices"]:
            if choice["finish_reason"] == "stop":
                assert isinstance(json.loads(choice["message"]["content"]), dict)
        for asked in ({"guided_choice": ["a", "b"]}, {"structured_outputs": {"regex": "[ab]"}}):
            body = {"prompt": "A", **asked, **HOT}
            text = loaded(await served.post(body, "/openai/v1/completions"))
            assert text["choices"][0]["text"] in ("a", "b")

    run(use, api="openai")


def test_structural_tags_and_responses() -> None:
    tag = {"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}
    older = {"type": "structural_tag", "structures": [tag], "triggers": ["<f="]}
    content = {"type": "json_schema", "json_schema": SCHEMA}
    newer = {"type": "tag", "begin": "<f=a>", "content": content, "end": "</f>"}
    newer = {"type": "structural_tag", "format": newer}

    async def use(served: Served) -> None:
        chat = {"messages": MESSAGES, **HOT, "seed": 4}
        for asked in (
            {"response_format": newer},
            {"structured_outputs": {"structural_tag": json.dumps(newer)}},
        ):
            answer = loaded(await served.post({**chat, **asked}, "/openai/v1/chat/completions"))
            text = answer["choices"][0]["message"]["content"]
            assert text.startswith("<f=a>")
            assert text.endswith("</f>")
            jsonschema.validate(json.loads(text[5:-4]), SCHEMA)
        answer = await served.post(
            {**chat, "response_format": older}, "/openai/v1/chat/completions"
        )
        assert answer.status == 200
        body = {"input": "Go", "max_output_tokens": 120, "temperature": 1.5}
        for asked, pattern in (
            ({"structured_outputs": {"regex": REGEX}}, REGEX),
            ({"text": {"format": newer}}, "<f=a>.*</f>"),
        ):
            given = loaded(await served.post({**body, **asked}, "/openai/v1/responses"))
            assert re.fullmatch(pattern, given["output"][-1]["content"][0]["text"])
        wrong = {**chat, "response_format": {**older, "triggers": ["<g="]}}
        error = error_of(await served.post(wrong, "/openai/v1/chat/completions"))
        assert error["param"] == "response_format"

    run(use, api="openai")


def _openai_parts(answer: Any) -> tuple[str, str]:
    said = answer["choices"][0]["message"]
    return said["reasoning_content"], said["content"]


def _response_parts(answer: Any) -> tuple[str, str]:
    thought, said = answer["output"]
    return thought["content"][0]["text"], said["content"][0]["text"]


def _message_parts(answer: Any) -> tuple[str, str]:
    thought, said = answer["content"]
    return thought["thinking"], said["text"]


FORM = {"type": "json_schema", "name": "thing", "schema": SCHEMA}
CHAT_FORM = {"response_format": {"type": "json_schema", "json_schema": FORM}, "messages": MESSAGES}
BUDGET = 6


@pytest.mark.parametrize(
    ("path", "body", "parts"),
    [
        (
            "/openai/v1/chat/completions",
            {**CHAT_FORM, "thinking_token_budget": BUDGET, "seed": 3, **HOT},
            _openai_parts,
        ),
        (
            "/invocations",
            {**CHAT_FORM, "thinking_token_budget": BUDGET, "seed": 3, **HOT},
            _openai_parts,
        ),
        (
            "/openai/v1/responses",
            {
                "input": "Go",
                "text": {"format": FORM},
                "thinking_token_budget": BUDGET,
                "temperature": 1.5,
            },
            _response_parts,
        ),
        (
            "/anthropic/v1/messages",
            {
                "messages": MESSAGES,
                "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
                "thinking": {"type": "enabled", "budget_tokens": BUDGET},
                "max_tokens": 200,
            },
            _message_parts,
        ),
    ],
)
def test_reasoning_comes_before_structure(
    path: str, body: Any, parts: Callable[[Any], tuple[str, str]]
) -> None:
    """In every protocol; and what is said is the same alone and beside others."""
    template = ChatTemplate.load(MODEL_DIR, reasoning=REASONING["deepseek_r1"])

    async def use(served: Served) -> None:
        alone = parts(loaded(await served.post(body, path)))
        assert alone[0].strip()
        jsonschema.validate(json.loads(alone[1]), SCHEMA)
        others = {"messages": MESSAGES, "guided_regex": REGEX, **HOT}
        answers = await asyncio.gather(
            *(served.post(others, "/openai/v1/chat/completions") for _ in range(3)),
            *(served.post(body, path) for _ in range(2)),
        )
        for answer in answers[3:]:
            thought, said = parts(loaded(answer))
            assert thought.strip()
            jsonschema.validate(json.loads(said), SCHEMA)
            if "seed" in body:
                assert (thought, said) == alone

    run(use, api="lmi", chat_template=template)


def test_openai_streams() -> None:
    async def use(served: Served) -> None:
        body = {"messages": MESSAGES, "guided_json": SCHEMA, "stream": True, "seed": 3, **HOT}
        answer = await served.post(body, "/openai/v1/chat/completions")
        text = ""
        for frame in answer.body.decode().split("\n\n"):
            if frame and frame != "data: [DONE]":
                text += json.loads(frame[6:])["choices"][0]["delta"].get("content", "")
        jsonschema.validate(json.loads(text), SCHEMA)

    run(use, api="openai")


def test_lmi() -> None:
    async def use(served: Served) -> None:
        parameters = {"temperature": 1.5, "max_new_tokens": 120, "seed": 1}
        for asked, pattern in (
            ({"guided_regex": REGEX}, REGEX),
            ({"guided_choice": ["left", "right"]}, "left|right"),
            ({"guided_grammar": 'root ::= "x" | "y"'}, "x|y"),
        ):
            body = {"inputs": "A", "parameters": {**parameters, **asked}}
            answer = loaded(await served.post(body))
            assert re.fullmatch(pattern, answer["generated_text"])
            assert not answer.get("details")
        body = {"inputs": "A", "parameters": {**parameters, "guided_json": SCHEMA}, "stream": True}
        lines = (await served.post(body)).body.splitlines()
        jsonschema.validate(json.loads(json.loads(lines[-1])["generated_text"]), SCHEMA)
        chat = {"messages": MESSAGES, "response_format": {"type": "json_object"}, **HOT}
        [choice] = loaded(await served.post(chat))["choices"]
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)

    run(use, api="lmi")


def test_tgi() -> None:
    async def use(served: Served) -> None:
        sampled = {"temperature": 1.5, "max_new_tokens": 120, "seed": 1, "details": True}
        for kind, value in (("json", SCHEMA), ("json_object", json.dumps(SCHEMA))):
            grammar = {"type": kind, "value": value}
            body = {"inputs": "A", "parameters": {**sampled, "grammar": grammar}}
            answer = loaded(await served.post(body, "/generate"))
            jsonschema.validate(json.loads(answer["generated_text"]), SCHEMA)
            assert answer["details"]["finish_reason"] == "eos_token"
            assert answer["details"]["tokens"][-1]["special"]
        grammar = {"type": "regex", "value": REGEX}
        body = {"inputs": "A", "parameters": {**sampled, "grammar": grammar}}
        frames = (await served.post(body, "/generate_stream")).body.decode().split("\n\n")
        assert re.fullmatch(REGEX, json.loads(frames[-2][5:])["generated_text"])
        for form in (
            {"type": "json_object", "value": SCHEMA},
            {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
        ):
            chat = {"messages": MESSAGES, "response_format": form, "seed": 5, **HOT}
            [choice] = loaded(await served.post(chat, "/v1/chat/completions"))["choices"]
            jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
            assert choice["finish_reason"] == "stop"

    run(use, api="tgi")


def test_a_bad_grammar_gets_the_protocols_own_error() -> None:
    async def use(served: Served) -> None:
        error = error_of(
            await served.post({"prompt": "A", "guided_regex": "[a"}, "/openai/v1/completions")
        )
        assert error["type"] == "invalid_request_error"
        assert error["param"] == "guided_regex"
        assert "guided_regex can't be used" in error["message"]
        answer = await served.post({"inputs": "A", "parameters": {"guided_regex": "[a"}})
        assert answer.status == 424
        assert "guided_regex can't be used" in error_of(answer)
        grammar = {"type": "json", "value": {"type": "object", "properties": {"a": {"type": "?"}}}}
        body = {"inputs": "A", "parameters": {"grammar": grammar}}
        answer = await served.post(body, "/tgi/generate")
        assert answer.status == 422
        assert json.loads(answer.body)["error_type"] == "validation"
        assert error_of(answer).startswith("Input validation error: grammar can't be used: ")
        answer = await served.post(body, "/tgi/generate_stream")
        assert answer.status == 200
        assert answer.body.startswith(b'data: {"error":"Input validation error: grammar can')
        assert loaded(await served.post({"inputs": "A"}))["generated_text"]

    run(use, api="lmi")


def test_grammars_can_be_disabled() -> None:
    async def use(served: Served) -> None:
        body = {"inputs": "A", "parameters": {"grammar": {"type": "regex", "value": "a"}}}
        answer = await served.post(body, "/generate")
        assert (answer.status, error_of(answer)) == (
            422,
            "Input validation error: grammar is not supported",
        )

    run(use, **configured("api=tgi", "disable_grammar_support=true"))


def test_without_the_library_requests_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "is_installed", lambda: False)
    advice = "structured output needs the 'structured' extra: pip install 'lmi-core[structured]'"

    async def use(served: Served) -> None:
        answer = await served.post({"prompt": "A", "guided_regex": "a"}, "/openai/v1/completions")
        assert answer.status == 400
        assert error_of(answer)["message"] == advice
        answer = await served.post({"inputs": "A", "parameters": {"guided_regex": "a"}})
        assert answer.status == 424
        assert advice in error_of(answer)
        body = {"inputs": "A", "parameters": {"grammar": {"type": "regex", "value": "a"}}}
        answer = await served.post(body, "/tgi/generate")
        assert answer.status == 422
        assert error_of(answer) == f"Input validation error: {advice}"

    run(use, api="lmi")


def test_offsets_of_an_echo_are_places_in_its_text() -> None:
    """Also where the token that begins every text isn't shown, and some are parts of characters."""

    async def use(served: Served) -> None:
        prompt = "Once upon a 日本 b"
        asked = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 2, "temperature": 0}
        [choice] = loaded(await served.post(asked, "/v1/completions"))["choices"]
        tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
        assert (tokens[0], offsets[:4]) == ("<|begin|>", [0, 0, 4, 9])
        assert offsets == sorted(offsets)
        shown = [(name, at) for name, at in zip(tokens, offsets, strict=True) if "�" not in name]
        assert all(choice["text"].startswith(name, at) for name, at in shown[1:])
        assert (" b", len(prompt) - 2) in shown

    run(use)
