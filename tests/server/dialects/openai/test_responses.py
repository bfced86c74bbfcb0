"""OpenAI's responses: to the byte over the scripted engine, and events by hand-made tokens."""

from __future__ import annotations

import asyncio
import json
import random
import re
from dataclasses import replace
from typing import Any

import pydantic
import pytest
from openai.types.responses import Response as SdkResponse
from openai.types.responses import ResponseStreamEvent

from lmi_core.engine.outputs import FinishReason, TokenEvent
from lmi_core.text.chat import ChatTemplate
from lmi_core.tools.reasoning import REASONING
from lmi_server.dialects.base import ParsedCall
from lmi_server.dialects.openai.responses import ResponsesCall, parse_with_stored
from lmi_server.dialects.openai.responses_tools import InputReader, as_arguments
from tests.server.dialects.openai.test_answer_forms import events
from tests.server.fake_engine import FakeEngine
from tests.server.harness import serving
from tests.server.parsing import model_of

TEMPLATE = ChatTemplate(
    {
        "default": "{{ tools }}{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{{ m.tool_calls }}{{ m.reasoning_content }}|{% endfor %}"
        "{% if add_generation_prompt %}A:{% endif %}{{ reasoning_effort }}"
    },
    reasoning=REASONING["qwen3"],
)
BODY: dict[str, Any] = {"model": "model", "max_output_tokens": 2, "input": "Hi there"}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
SHELL = {"type": "custom", "name": "shell", "description": "Runs it."}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /[a-c]+/"}
LARK = {**SHELL, "format": GRAMMAR}
PATTERN = {**SHELL, "format": {"type": "grammar", "syntax": "regex", "definition": "[a-c]+"}}
_EVENTS: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)
_VOLATILE = (
    (rb'"(created_at|completed_at)": \d+', rb'"\1": 0'),
    (rb'"(resp|msg|rs|fc|ctc|call)_[0-9a-f]+"', rb'"\1_1"'),
)


def post(body: dict[str, Any], path: str = "/v1/responses", **options: Any) -> tuple[int, bytes]:
    engine = options.pop("engine", None)

    async def run() -> tuple[int, bytes]:
        async with serving(engine, chat_template=TEMPLATE, **options) as served:
            answer = await served.post(body, path)
            return answer.status, steady(answer.body)

    return asyncio.run(run())


def steady(body: bytes) -> bytes:
    for pattern, instead in _VOLATILE:
        body = re.sub(pattern, instead, body)
    return body


HEAD = (
    '"id": "resp_1", "object": "response", "created_at": 0, "model": "model", "background": false, '
    '"instructions": null, "max_output_tokens": 2, "max_tool_calls": null, '
    '"metadata": {}, "parallel_tool_calls": true, "previous_response_id": null, "reasoning": '
    '{"effort": null, "summary": null}, "temperature": 1.0, "text": {"format": '
    '{"type": "text"}}, "tool_choice": "auto", "tools": [], "top_p": 1.0, "truncation": '
    '"disabled", "user": null, "error": null, "store": true'
)
BEGUN = (
    f'{{{HEAD}, "status": "in_progress", "completed_at": null, "incomplete_details": null, '
    '"output": [], "usage": null}'
)
SAID = (
    '{"id": "msg_1", "type": "message", "role": "assistant", "status": "incomplete", "content": '
    '[{"type": "output_text", "text": " a fox", "annotations": [], "logprobs": []}]}'
)
WHOLE = (
    f'{{{HEAD}, "status": "incomplete", "completed_at": null, "incomplete_details": {{"reason": '
    f'"max_output_tokens"}}, "output": [{SAID}], "usage": {{"input_tokens": 2, '
    '"input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0}, "output_tokens": 2, '
    '"output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 4}}'
)
PLACE = '"item_id": "msg_1", "output_index": 0, "content_index": 0'
ITEM = '"id": "msg_1", "type": "message", "role": "assistant"'
EVENTS = (
    ("response.created", f'"response": {BEGUN}'),
    ("response.in_progress", f'"response": {BEGUN}'),
    (
        "response.output_item.added",
        f'"output_index": 0, "item": {{{ITEM}, "status": "in_progress", "content": []}}',
    ),
    (
        "response.content_part.added",
        f'{PLACE}, "part": {{"type": "output_text", "text": "", "annotations": [], '
        '"logprobs": []}',
    ),
    ("response.output_text.delta", f'{PLACE}, "delta": " a", "logprobs": []'),
    ("response.output_text.delta", f'{PLACE}, "delta": " fox", "logprobs": []'),
    ("response.output_text.done", f'{PLACE}, "text": " a fox", "logprobs": []'),
    (
        "response.content_part.done",
        f'{PLACE}, "part": {{"type": "output_text", "text": " a fox", "annotations": [], '
        '"logprobs": []}',
    ),
    ("response.output_item.done", f'"output_index": 0, "item": {SAID}'),
    ("response.incomplete", f'"response": {WHOLE}'),
)


def test_a_response() -> None:
    status, body = post(BODY)
    assert (status, body.decode()) == (200, WHOLE)


def test_its_events() -> None:
    status, body = post({**BODY, "stream": True})
    assert status == 200
    assert body.decode() == "".join(
        f'event: {kind}\ndata: {{"type": "{kind}", "sequence_number": {number}, {fields}}}\n\n'
        for number, (kind, fields) in enumerate(EVENTS)
    )


def parse(**fields: Any) -> ParsedCall:
    body = json.dumps({**BODY, **fields}).encode()
    call = ResponsesCall(request_id="r", body=body, stores=True)
    return parse_with_stored(model_of("model", chat_template=TEMPLATE), call)


def rendered(tokens: list[TokenEvent], **asked: Any) -> dict[str, Any]:
    """The whole answer to a text; the events must build it as well, and be the SDK's."""
    whole, streamed = (parse(**asked, stream=on).renderer for on in (False, True))
    whole.feed(0, tokens)
    answer = json.loads(steady(whole.finish()))
    frames = b"".join(streamed.feed(0, [token]) for token in tokens) + streamed.finish()
    assert json.loads(steady(json.dumps(built_from(frames)).encode())) == answer
    SdkResponse.model_validate(answer)
    assert isinstance(answer, dict)
    return answer


_GROWING = {
    "response.output_text": ("text", "content"),
    "response.reasoning_text": ("text", "content"),
    "response.function_call_arguments": ("arguments", ""),
    "response.custom_tool_call_input": ("input", ""),
}


def built_from(frames: bytes) -> dict[str, Any]:
    """As a client builds it."""
    items: list[dict[str, Any]] = []
    kinds = []
    for number, frame in enumerate(frames.decode().split("\n\n")[:-1]):
        kind, data = frame.removeprefix("event: ").split("\ndata: ")
        event = json.loads(data)
        _EVENTS.validate_python(event)
        assert (event["type"], event["sequence_number"]) == (kind, number)
        kinds.append(kind)
        part, _, what = kind.rpartition(".")
        if "output_index" in event and kind != "response.output_item.added":
            item = items[event["output_index"]]
            assert event["output_index"] == len(items) - 1
            assert event.get("item_id", item["id"]) == item["id"]
        if kind == "response.output_item.added":
            items.append(event["item"])
        elif kind == "response.content_part.added":
            item["content"].append(event["part"])
        elif kind == "response.content_part.done":
            assert event["part"] == item["content"][0]
        elif kind == "response.output_item.done":
            assert {**item, "status": ""} == {**event["item"], "status": ""}
            items[-1] = event["item"]
        elif part in _GROWING:
            name, within = _GROWING[part]
            grown = item[within][0] if within else item
            if what == "delta":
                grown[name] += event["delta"]
            else:
                assert grown[name] == event[name]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    response = event["response"]
    assert kinds[-1] == f"response.{response['status']}"
    assert response["output"] == items
    assert isinstance(response, dict)
    return response


def call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def test_reasoning_text_and_calls() -> None:
    text = "<think>Hm.</think>\nSo: " + call("f", '{"a": [1]}') + call("f", "{}")
    answer = rendered(events(text), tools=[TOOL])
    assert answer["status"] == "completed"
    thought, said, first, second = answer["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert said["content"][0]["text"] == "So: "
    assert (first["name"], first["arguments"], first["status"]) == ("f", '{"a": [1]}', "completed")
    assert second["arguments"] == "{}"
    usage = answer["usage"]
    assert usage["output_tokens"] == len(text)
    assert usage["output_tokens_details"]["reasoning_tokens"] == len("<think>Hm.")


def test_a_custom_tool() -> None:
    given = 'a "b"\n\\ é\U0001f600'
    for arguments in (as_arguments(given), json.dumps({"input": given})):
        [made] = rendered(events(call("shell", arguments)), tools=[TOOL, SHELL])["output"]
        assert made == {
            "id": "ctc_1",
            "type": "custom_tool_call",
            "status": "completed",
            "call_id": "call_1",
            "name": "shell",
            "input": given,
        }
    [odd] = rendered(events(call("shell", '{"cmd": "ls"}')), tools=[SHELL])["output"]
    assert odd["input"] == '{"cmd": "ls"}'


@pytest.mark.parametrize("seed", range(20))
def test_inputs_are_read_however_they_are_split(seed: int) -> None:
    chance = random.Random(seed)
    text = "".join(chance.choice('ab"\\\n\té漢\U0001f600\u2028/u') for _ in range(40))
    written = json.dumps({"input": text}, ensure_ascii=bool(seed % 2))
    reader, read = InputReader(), ""
    while written:
        size = chance.randint(1, 7)
        read += reader.push(written[:size])
        written = written[size:]
    assert read + reader.flush() == text


def test_a_call_that_was_cut_short() -> None:
    text = call("f", "{}") + '<tool_call>{"name": "f", "arguments": {"a": '
    tokens = events(text)
    tokens[-1] = replace(tokens[-1], finish_reason=FinishReason.LENGTH)
    answer = rendered(tokens, tools=[TOOL])
    assert answer["status"] == "incomplete"
    assert [item["status"] for item in answer["output"]] == ["completed", "incomplete"]


def test_an_answer_without_a_word() -> None:
    [end] = events("x")
    answer = rendered([replace(end, text="")])
    assert answer["output"][0]["content"][0]["text"] == ""


def test_a_named_tool_of_a_lark_grammar_is_the_whole_answer() -> None:
    asked: dict[str, Any] = {"tools": [LARK], "tool_choice": {"type": "custom", "name": "shell"}}
    [request] = parse(**asked).requests
    assert request.params.grammar is not None
    assert request.params.grammar.text == "start: /[a-c]+/"
    assert request.params.grammar.field == "tools"
    assert "Write the input of the tool shell, and nothing else. Runs it." in (request.prompt or "")
    [made] = rendered(events("abc"), **asked)["output"]
    assert (made["type"], made["input"]) == ("custom_tool_call", "abc")


def test_a_pattern_is_enforced() -> None:
    for choice in ("auto", "required"):
        grammar = parse(tools=[PATTERN], tool_choice=choice).requests[0].params.grammar
        assert grammar is not None
        assert '"pattern": "^(?:[a-c]+)$"' in grammar.text


def test_the_prompt() -> None:
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "brief"}]},
        {"type": "message", "role": "user", "content": "Go"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "custom_tool_call", "call_id": "2", "name": "shell", "input": "ls"},
        {"type": "function_call_output", "call_id": "1", "output": "7"},
        {"type": "custom_tool_call_output", "call_id": "2",
         "output": [{"type": "input_text", "text": "x"}]},
    ]  # fmt: skip
    [request] = parse(input=items, instructions="Be", reasoning={"effort": "low"}).requests
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
        {
            "id": "2",
            "type": "function",
            "function": {"name": "shell", "arguments": {"input": "ls"}},
        },
    ]
    assert request.prompt == (
        f"Nonesystem:Be\n\nbrief|user:Go|assistant:I{calls}Hm|tool:7|tool:x|A:low"
    )


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


TEXT = {"type": "any_text"}


def test_a_format_beside_tools() -> None:
    form = {"type": "json_schema", "name": "n", "schema": SCHEMA}
    said = parse(tools=[TOOL], text={"format": form}).requests[0].params.grammar
    assert said is not None
    assert (said.field, said.instead is not None) == ("text.format", True)
    for choice in ("none", "required"):
        asked = parse(tools=[TOOL], tool_choice=choice, text={"format": form}).requests[0].params
        assert asked.grammar is not None
        assert (asked.grammar.field, asked.grammar.instead) == (
            "text.format" if choice == "none" else "tools",
            None,
        )
    named = {"type": "custom", "name": "shell"}
    alone = parse(tools=[LARK], tool_choice=named, text={"format": form}).requests[0].params.grammar
    assert alone is not None
    assert alone.text == "start: /[a-c]+/"


def test_text_formats() -> None:
    form = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    grammar = parse(text={"format": form}).requests[0].params.grammar
    assert grammar is not None
    assert (json.loads(grammar.text), grammar.field) == (SCHEMA, "text.format")
    assert parse(text={"format": {"type": "json_object"}}).requests[0].params.grammar
    assert parse(text={"format": {"type": "text"}}).requests[0].params.grammar is None


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"input": []}, "input", "input is empty"),
        ({"input": None}, "input", "input"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type", "'computer_call'"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "item_reference"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "must be user"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0]", "'input_image'; only text"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a":'}]},
         "input[0].arguments", "JSON text of an object"),
        ({"input": [{"type": "function_call_output", "call_id": "9", "output": "x"}]},
         "input[0].call_id", "no call before it"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search'"),
        ({"tools": [{"type": "function"}]}, "tools[0]", "needs a name"),
        ({"tools": [{**SHELL, "format": {"type": "x"}}]}, "tools[0].format", "definition"),
        ({"tools": [LARK]}, "tools", "enforced only where tool_choice names"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice", "'g'"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice", "tool_choice must be"),
        ({"tools": [TOOL], "text": {"format": {"type": "structural_tag", "format": TEXT}}},
         "text.format", "can have a JSON schema"),
        ({"tools": [TOOL], "structured_outputs": {"regex": "a*"}}, "structured_outputs",
         "can have a JSON schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", "text.format must be"),
        ({"background": True}, "background", "not available here; leave background out"),
        ({"conversation": "c"}, "conversation", "not available"),
        ({"prompt": {"id": "p"}}, "prompt", "not available"),
        ({"truncation": "auto"}, "truncation", "must be disabled"),
        ({"include": ["web_search_call.results"]}, "include", "web_search_call.results"),
        ({"reasoning": {"effort": "wild"}}, "reasoning.effort", "'wild'"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"temperature": 3}, "temperature", "between 0 and 2"),
    ],
)  # fmt: skip
def test_errors(changes: dict[str, Any], param: str, words: str) -> None:
    status, body = post({**BODY, **changes})
    error = json.loads(body)["error"]
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert words in error["message"]


def test_failures() -> None:
    status, body = post({**BODY, "model": "other"})
    assert (status, json.loads(body)["error"]["code"]) == (404, "model_not_found")
    status, body = post(BODY, engine=FakeEngine(fail_after=0))
    assert (status, json.loads(body)["error"]["type"]) == (500, "server_error")
    status, body = post({**BODY, "stream": True}, engine=FakeEngine(fail_after=1))
    assert status == 200
    last = json.loads(body.split(b"\n\n")[-2].partition(b"data: ")[2])
    _EVENTS.validate_python(last)
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error"
    assert "no such kernel" in last["response"]["error"]["message"]
