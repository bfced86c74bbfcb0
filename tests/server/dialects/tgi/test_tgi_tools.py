"""TGI's tools: forced calls, free ones, answers in text, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from lmi_core.text.chat import ChatTemplate
from lmi_server.dialects.tgi.errors import TgiError
from lmi_server.dialects.tgi.tools import (
    NO_TOOL,
    ArgumentStream,
    arguments_of,
    called_name,
    tgi_tools,
)
from lmi_server.dialects.tgi.v1_schema import chat_tools, decode_chat, render_chat
from tests.server.dialects.openai.test_chat_tools import SCHEMAS, TOKENIZER, TOOLS, WEATHER
from tests.server.harness import Served
from tests.server.test_structured import HOT, MESSAGES, loaded, run

CHAT = "/v1/chat/completions"
NOW = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object", "properties": {}}},
}
BOTH = [WEATHER, NOW]


def check_call(call: dict[str, Any]) -> str:
    name: str = call["function"]["name"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[name])
    return name


def test_forced_calls() -> None:
    async def use(served: Served) -> None:
        for number, choice in enumerate(
            ["required", "weather", {"type": "function", "function": {"name": "now"}}]
        ):
            body = {"messages": MESSAGES, "tools": BOTH, "tool_choice": choice, "seed": 2, **HOT}
            [answer] = loaded(await served.post(body, CHAT))["choices"]
            assert list(answer["message"]) == ["role", "tool_calls"]
            [call] = answer["message"]["tool_calls"]
            assert (call["id"], call["function"]["description"]) == ("0", None)
            name = check_call(call)
            assert number == 0 or name == ["weather", "now"][number - 1]
            assert answer["finish_reason"] == "stop"
            deltas = await streamed(served, body)
            assert all(delta["role"] == "assistant" for delta in deltas)
            calls = [delta["tool_calls"][0] for delta in deltas]
            assert calls[0]["function"]["name"] == name
            assert calls[0]["function"]["arguments"].startswith("{")
            assert all(later["function"]["name"] is None for later in calls[1:])
            arguments = "".join(one["function"]["arguments"] for one in calls)
            assert json.loads(arguments) == json.loads(call["function"]["arguments"])

    run(use, api="tgi")


async def streamed(served: Served, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await served.post({**body, "stream": True}, CHAT)
    assert answer.body.endswith(b"data: [DONE]\n\n")
    frames = answer.body.decode().split("\n\n")[:-2]
    return [json.loads(frame[6:])["choices"][0]["delta"] for frame in frames]


def test_free_calls() -> None:
    async def use(served: Served) -> None:
        for seed in range(3):
            body = {"messages": MESSAGES, "tools": BOTH, "seed": seed, **HOT}
            message = loaded(await served.post(body, CHAT))["choices"][0]["message"]
            deltas = await streamed(served, body)
            assert ("tool_calls" in message) == ("tool_calls" in deltas[0])
            if "tool_calls" in message:
                check_call(message["tool_calls"][0])

    run(use, api="tgi")


def test_an_answer_in_text_is_that_of_a_chat_without_tools() -> None:
    token_ids = TOKENIZER.encode_now(NO_TOOL, add_special_tokens=False)
    plain = {"messages": MESSAGES, "logit_bias": {str(i): 50 for i in token_ids}, **HOT}

    async def use(served: Served) -> None:
        for seed in range(2):
            body = {**plain, "tools": BOTH, "seed": seed}
            whole = loaded(await served.post(body, CHAT))
            expected = loaded(await served.post({**plain, "seed": seed}, CHAT))
            assert whole["choices"] == expected["choices"]
            assert whole["choices"][0]["message"]["content"]
            assert whole["usage"] == expected["usage"]
            text = "".join(delta["content"] for delta in await streamed(served, body))
            assert text == whole["choices"][0]["message"]["content"]

    run(use, api="tgi")


def prompt_of(template: str, **fields: Any) -> str:
    chat = decode_chat(json.dumps({"messages": MESSAGES, "tools": TOOLS, **fields}).encode())
    return render_chat(chat, ChatTemplate({"default": template}), chat_tools(chat))


def test_prompts() -> None:
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    prompt = prompt_of(plain, tool_prompt="Use them.")
    assert prompt.startswith('Go\n---\n[{"type":"function","function":{"description":"The weather')
    assert f'"name":"{NO_TOOL}"' in prompt
    assert prompt.endswith("]\nUse them.")
    assert NO_TOOL not in prompt_of(plain, tool_choice="required")
    assert prompt_of(plain, tool_choice="none") == "Go"
    assert "Given the functions available" in prompt_of(plain, tool_prompt="")
    described = prompt_of("{{ tools[0].function.arguments }}|" + plain, tool_prompt="Use.")
    assert described.startswith('{"type":"object","properties":{"city"')
    assert described.endswith("|Go\n---\nUse.")


@pytest.mark.parametrize(
    ("tools", "choice", "has_grammar", "message"),
    [
        (BOTH, "other", False, "Tool error: Tool with name other not found"),
        (BOTH, "auto", True, "Tool error: Grammar and tools are mutually exclusive"),
        ([], None, True, "Tool error: Grammar and tools are mutually exclusive"),
        (BOTH, 3, False, "Tool error: tool_choice must be"),
        ([{"type": "function"}], None, False, "Tool error: every tool needs a function"),
        (["x"], None, False, "Tool error: every tool needs a function"),
    ],
)
def test_refused(tools: list[Any], choice: Any, has_grammar: bool, message: str) -> None:
    with pytest.raises(TgiError) as caught:
        tgi_tools(tools, choice, None, has_grammar=has_grammar)
    assert str(caught.value).startswith(message)
    assert (caught.value.error_type, caught.value.status) == ("tool_error", 422)


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ('{"function": {"_name": "f", "a": "x } y", "b": {"c": {}}}}', "f", None),
        ('{"function":{"_name":"f"}}', "f", None),
        ('{ "function" : { "_name" : "f" , "a" : [1, {}] } }', "f", None),
    ],
)
def test_arguments_in_pieces(text: str, name: str, arguments: None) -> None:
    expected = {k: v for k, v in json.loads(text)["function"].items() if k != "_name"}
    assert called_name(text) == name
    assert json.loads(arguments_of(text)) == expected
    for size in (1, 2, 3, 7, 100):
        stream = ArgumentStream()
        pushed = [stream.push(text[i : i + size]) for i in range(0, len(text), size)]
        assert [one for one, _ in pushed if one is not None] == [name]
        whole = "".join(piece for _, piece in pushed) + stream.flush()
        assert json.loads(whole) == expected
        assert whole.startswith("{")


def test_a_call_cut_short_is_an_error() -> None:
    with pytest.raises(TgiError, match="is cut short"):
        arguments_of('{"function": {"_name": "f", "a": "x')
    assert called_name('{"function": {"_na') is None

    async def use(served: Served) -> None:
        body = {**HOT, "max_tokens": 3}
        body = {"messages": MESSAGES, "tools": BOTH, "tool_choice": "required", **body}
        answer = await served.post(body, CHAT)
        assert answer.status == 422
        assert json.loads(answer.body)["error_type"] == "tool_error"

    run(use, api="tgi")
