"""OpenAI's objects to the byte, over the scripted engine."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any

import pytest

from lmi_core.engine.outputs import FinishReason, PromptToken, TokenEvent, TokenLogprob
from lmi_core.structured.grammar import Grammar
from lmi_core.text.chat import ChatTemplate
from lmi_server.dialects.base import Call, ParsedCall
from lmi_server.dialects.openai.openai import parse_chat, parse_completion
from tests.server.dialects.lmi.test_lmi_formats import render
from tests.server.fake_engine import FakeEngine
from tests.server.harness import serving
from tests.server.parsing import model_of
from tests.server.watchdog import ALLOWANCE, LIMIT_S

TEMPLATE = ChatTemplate(
    {
        "default": "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls }}\n"
        "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}{{ mood }}"
    }
)
CHAT = {"messages": [{"role": "user", "content": "Hi there"}], "max_tokens": 2}
TEXT = {"prompt": "He is", "max_tokens": 2}
MODEL = model_of(chat_template=TEMPLATE)


def parse(body: dict[str, Any]) -> ParsedCall:
    call = Call(request_id="r", body=json.dumps(body).encode(), content_type="application/json")
    return (parse_chat if "messages" in body else parse_completion)(MODEL, call)


def untimed(data: bytes) -> bytes:
    return re.sub(rb'"created":\d+', b'"created":0', data)


def objects(data: bytes) -> list[dict[str, Any]]:
    """The objects of a stream that ends as it should."""
    *events, done, rest = data.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


def test_completion_object() -> None:
    assert untimed(render(parse(TEXT))) == (
        b'{"id":"cmpl-r","object":"text_completion","created":0,"model":"m","choices":'
        b'[{"index":0,"text":" a fox","logprobs":null,"finish_reason":"length",'
        b'"prompt_logprobs":null}],"usage":{"prompt_tokens":2,"completion_tokens":2,"total_tokens":4,'
        b'"prompt_tokens_details":{"cached_tokens":1}}}'
    )


def test_completion_frames() -> None:
    head = b'data: {"id":"cmpl-r","object":"text_completion","created":0,"model":"m","choices":['
    assert untimed(render(parse({**TEXT, "stream": True}))) == (
        head + b'{"index":0,"text":" a","logprobs":null,"finish_reason":null}]}\n\n'
        + head + b'{"index":0,"text":" fox","logprobs":null,"finish_reason":"length"}]}\n\n'
        b"data: [DONE]\n\n"
    )  # fmt: skip


def test_chat_object() -> None:
    assert untimed(render(parse(CHAT))) == (
        b'{"id":"chatcmpl-r","object":"chat.completion","created":0,"model":"m","choices":'
        b'[{"index":0,"message":{"role":"assistant","content":" a fox"},"logprobs":null,'
        b'"finish_reason":"length"}],"usage":{"prompt_tokens":4,"completion_tokens":2,'
        b'"total_tokens":6,"prompt_tokens_details":{"cached_tokens":2}},"prompt_logprobs":null}'
    )


def test_chat_frames() -> None:
    head = (
        b'data: {"id":"chatcmpl-r","object":"chat.completion.chunk","created":0,"model":"m",'
        b'"choices":[{"index":0,"delta":{'
    )
    body = {**CHAT, "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    assert untimed(render(parse(body))) == (
        head + b'"role":"assistant","content":" a"},"logprobs":null,"finish_reason":null}],'
        b'"usage":null}\n\n'
        + head + b'"content":" fox"},"logprobs":null,"finish_reason":null}],"usage":null}\n\n'
        + head + b'"content":" \\"quoted\\""},"logprobs":null,"finish_reason":"length"}],'
        b'"usage":null}\n\n'
        b'data: {"id":"chatcmpl-r","object":"chat.completion.chunk","created":0,"model":"m",'
        b'"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":3,"total_tokens":7,'
        b'"prompt_tokens_details":{"cached_tokens":2}}}\n\ndata: [DONE]\n\n'
    )  # fmt: skip


@pytest.mark.parametrize("body", [TEXT, CHAT])
def test_frames_equal_the_json_module(body: dict[str, Any]) -> None:
    """Frames are put together by hand; they must be what json.dumps would write."""
    data = render(parse({**body, "max_tokens": 9, "n": 2, "stream": True}))
    for event in data.decode().split("\n\n")[:-2]:
        text = event.removeprefix("data: ")
        again = json.dumps(json.loads(text), ensure_ascii=False, separators=(",", ":"))
        assert again == text


def test_logprobs_of_a_completion_and_its_echo() -> None:
    [choice] = json.loads(render(parse({**TEXT, "logprobs": 1, "echo": True})))["choices"]
    assert choice["text"] == "He is a fox"
    assert choice["logprobs"] == {
        "tokens": ["He", "is", " a", " fox"],
        "token_logprobs": [None, -1.5, -0.5, -0.5],
        "top_logprobs": [None, {"is": -1.5}, {"t0": -0.5, " a": -0.5}, {"t0": -0.5, " fox": -0.5}],
        "text_offset": [0, 2, 5, 7],
    }
    streamed = objects(render(parse({**TEXT, "logprobs": 1, "echo": True, "stream": True})))
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == choice["text"]
    parts = [chunk["choices"][0]["logprobs"] for chunk in streamed]
    for name, whole in choice["logprobs"].items():
        assert [item for part in parts for item in part[name]] == whole


def test_a_long_echo_of_many_choices_waits_for_the_end() -> None:
    """Where it is shown off the loop, and made once for all of them."""
    text = "He" + " is" * 1999
    renderer = parse({**TEXT, "prompt": text, "logprobs": 20, "echo": True, "n": 64}).renderer
    top = tuple(TokenLogprob(i, f"t{i}", -1.0 - i) for i in range(20))
    prompt = (PromptToken(1, "He", None), *[PromptToken(2, " is", -0.5, top)] * 1999)
    events = [TokenEvent("r", 0, -1, "", prompt=prompt)]
    for i in range(64):
        event = TokenEvent("r", i, 3, " a", token=" a", logprob=-0.5 - i, num_generated_tokens=1)
        event.finish_reason = FinishReason.LENGTH
        events.append(event)
    started_s = time.thread_time()
    renderer.feed(0, events)
    assert time.thread_time() - started_s < ALLOWANCE * LIMIT_S
    for i, choice in enumerate(json.loads(renderer.finish())["choices"]):
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == ["He", *[" is"] * 1999, " a"]
        assert logprobs["token_logprobs"] == [None, *[-0.5] * 1999, -0.5 - i]
        assert [len(each or ()) for each in logprobs["top_logprobs"]] == [0, *[21] * 1999, 1]
        assert logprobs["text_offset"][-2:] == [2 + 3 * 1998, len(text)]


def test_echo_of_token_ids_without_logprobs() -> None:
    parsed = parse({**TEXT, "prompt": [7, 8], "echo": True})
    assert parsed.requests[0].prompt_token_ids == (7, 8)
    assert not parsed.requests[0].echo
    assert json.loads(render(parsed))["choices"][0]["text"] == "<7><8> a fox"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [(1, 2)]),
        ([[1, 2], [3]], [(1, 2), (3,)]),
        (["a", [3]], ["a", (3,)]),
    ],
)
def test_shapes_of_prompts(prompt: Any, prompts: list[Any]) -> None:
    requests = parse({"prompt": prompt}).requests
    assert [request.prompt or request.prompt_token_ids for request in requests] == prompts
    assert {request.params.max_new_tokens for request in requests} == {16}


def test_parameters() -> None:
    params = parse(
        {
            **TEXT,
            "min_tokens": 1,
            "top_k": -1,
            "min_p": 0.1,
            "typical_p": 0.9,
            "seed": -1,
            "stop_token_ids": [4],
            "ignore_eos": True,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "best_of": 2,
            "n": 2,
            "repetition_penalty": 1.2,
            "length_penalty": 1.0,
            "use_beam_search": False,
        }
    ).requests[0].params  # fmt: skip
    assert (params.min_new_tokens, params.top_k, params.min_p) == (1, 0, 0.1)
    assert (params.seed, params.stop_token_ids, params.n) == (2**64 - 1, (4,), 2)
    assert params.typical_p == 0.9
    assert params.ignore_eos
    assert params.include_stop
    assert not params.skip_special_tokens
    assert (params.temperature, params.repetition_penalty) == (1.0, 1.2)


def test_best_of() -> None:
    """The scripted engine's later choices are the likelier ones; all of them are counted."""
    parsed = parse({**TEXT, "prompt": ["He is", "It was"], "n": 2, "best_of": 4})
    assert [(r.params.n, r.params.logprobs) for r in parsed.requests] == [(4, 0), (4, 0)]
    answer = json.loads(render(parsed))
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [
        (0, "\n é"), (1, ' "quoted"\n'), (2, "\n é"), (3, ' "quoted"\n')
    ]  # fmt: skip
    assert [choice["logprobs"] for choice in answer["choices"]] == [None] * 4
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4, 16)


def test_best_of_with_echo_and_logprobs() -> None:
    asked = {**TEXT, "best_of": 2, "echo": True, "logprobs": 0}
    [choice] = json.loads(render(parse(asked)))["choices"]
    assert choice["text"] == 'He is fox "quoted"'
    assert choice["logprobs"]["token_logprobs"] == [None, -1.5, -0.25, -0.25]


def test_best_of_that_chooses_nothing_keeps_the_order() -> None:
    both = [json.loads(render(parse({**TEXT, "n": 2, **more}))) for more in ({}, {"best_of": 2})]
    assert both[0]["choices"] == both[1]["choices"]
    assert render(parse({**TEXT, "n": 2, "best_of": 2, "stream": True}))


def test_chat_template_arguments() -> None:
    asked = {**CHAT, "chat_template_kwargs": {"mood": "!", "messages": []}}
    assert parse(asked).requests[0].prompt == "user: Hi there\nassistant:!"
    asked = {**asked, "add_generation_prompt": False}
    assert parse(asked).requests[0].prompt == "user: Hi there\n!"
    asked = {**CHAT, "continue_final_message": True}
    assert parse(asked).requests[0].prompt == "user: Hi there"


def test_tool_calls_of_the_history_reach_the_template_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [{"role": "assistant", "tool_calls": [call]}, *CHAT["messages"]]  # type: ignore[misc]
    prompt = parse({**CHAT, "messages": messages}).requests[0].prompt
    assert prompt is not None
    assert "'arguments': {'a': 1}" in prompt


SCHEMA = {"type": "object", "properties": {"a": {}}}


@pytest.mark.parametrize("body", [TEXT, CHAT])
@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": {}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar.json_object()),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": SCHEMA},
                }
            },
            Grammar.json_schema(SCHEMA),
        ),
        # TGI's form, which huggingface_hub makes of OpenAI's, and llama-server's.
        *(
            ({"response_format": {"type": kind, name: SCHEMA}}, Grammar.json_schema(SCHEMA))
            for kind, name in (
                ("json", "value"),
                ("json_object", "value"),
                ("json_object", "schema"),
            )
        ),
        ({"response_format": {"type": "regex", "value": "a+"}}, Grammar.regex("a+")),
        ({"guided_json": SCHEMA}, Grammar.json_schema(SCHEMA)),
        ({"guided_json": '{"type": "object"}'}, Grammar.json_schema('{"type": "object"}')),
        ({"guided_regex": "a+"}, Grammar.regex("a+")),
        ({"guided_choice": ["a", "b"]}, Grammar.choice(["a", "b"])),
        ({"guided_grammar": "root ::= 'a'"}, Grammar.context_free("root ::= 'a'")),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, Grammar.json_schema(SCHEMA)),
        ({"structured_outputs": {"json_object": True}}, Grammar.json_object()),
    ],
    ids=lambda value: str(value)[:50],
)
def test_grammars(body: dict[str, Any], asked: dict[str, Any], expected: Grammar | None) -> None:
    grammar = parse({**body, **asked}).requests[0].params.grammar
    assert grammar == expected
    assert grammar is None or grammar.field in asked


def test_tools_that_must_not_be_called_are_no_obstacle() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert parse({**CHAT, "tools": tools, "tool_choice": "none"}).requests


def test_unknown_fields_are_logged_and_known_ones_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parse({**TEXT, "user": "u", "store": True, "tempratur": 1})
    assert "unknown fields are ignored: tempratur" in caplog.text
    assert "user" not in caplog.text


def test_tokens() -> None:
    async def run() -> None:
        async with serving(chat_template=TEMPLATE) as served:
            asked = {"prompt": "a b", "return_token_strs": True}
            answer = json.loads((await served.post(asked, "/tokenize")).body)
            assert answer == {
                "count": 2,
                "max_model_len": 4096,
                "tokens": [1, 2],
                "token_strs": [" fox", ' "quoted"'],
            }
            chat = json.loads((await served.post({"messages": CHAT["messages"]}, "/tokenize")).body)
            assert chat["count"] == 4
            text = await served.post({"tokens": [0, 1]}, "/detokenize")
            assert json.loads(text.body) == {"prompt": " a fox"}

    asyncio.run(run())


def test_streams_of_several_prompts_are_one_response() -> None:
    async def run() -> None:
        async with serving(FakeEngine(delay_s=0.001)) as served:
            asked = {"prompt": ["a", "b c"], "max_tokens": 4, "stream": True, "n": 2}
            asked["stream_options"] = {"include_usage": True}
            answer = await served.post(asked, "/v1/completions")
            assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            assert answer.headers["Cache-Control"] == "no-cache"
            chunks = objects(answer.body)
            texts = [""] * 4
            for chunk in chunks[:-1]:
                [choice] = chunk["choices"]
                texts[choice["index"]] += choice["text"]
            assert texts[0] == texts[2] == ' a fox "quoted"\n'
            assert texts[1] == texts[3] == ' fox "quoted"\n é'
            usage = chunks[-1]["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 16)

    asyncio.run(run())
