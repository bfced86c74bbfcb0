"""Tools of chats: what the model is told, which calls must come, and how they are answered."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema
import pytest

from lmi_core.demo import MODEL_DIR
from lmi_core.engine.outputs import FinishReason, TokenEvent
from lmi_core.errors import UserError
from lmi_core.structured.guidance import GuidanceLibrary
from lmi_core.text.chat import ChatTemplate
from lmi_core.text.tokenizer import Tokenizer
from lmi_core.tools.forms import FORMS
from lmi_core.tools.forms import LLAMA as LLAMA_FORM
from lmi_core.tools.reader import TextParser
from lmi_core.tools.tools import call_grammar, tool_of
from lmi_server.dialects.base import Call, ParsedCall
from lmi_server.dialects.openai.openai import parse_chat
from tests.server.parsing import model_of
from tests.server.test_structured import HOT, MESSAGES, loaded, run

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 8},
                "days": {"$ref": "#/$defs/days"},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
SCHEMAS: dict[str, Any] = {
    "weather": WEATHER["function"]["parameters"],  # type: ignore[index]
    "now": {"type": "object", "maxProperties": 0},
}

PLAIN = ChatTemplate(
    {"default": "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"}
)
HERMES = ChatTemplate(
    {
        "default": "{% if tools %}Tools: {{ tools | tojson }} <tool_call>{% endif %}"
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ m.tool_calls }}{% endfor %}"
    }
)
LLAMA = ChatTemplate({"default": "{{ tools }}<|python_tag|>{{ messages[0].content }}"})


def parse(template: ChatTemplate = HERMES, **fields: Any) -> ParsedCall:
    body = {"messages": MESSAGES, "tools": TOOLS, **fields}
    call = Call(request_id="r", body=json.dumps(body).encode())
    return parse_chat(model_of(chat_template=template), call)


def prompt_of(template: ChatTemplate, **fields: Any) -> str:
    prompt = parse(template, **fields).requests[0].prompt
    assert prompt is not None
    return prompt


def answered(
    parsed: ParsedCall, texts: list[str], reason: FinishReason = FinishReason.EOS
) -> bytes:
    """What the client gets when the model writes these texts."""
    out = b""
    for number, text in enumerate(texts, 1):
        event = TokenEvent(
            request_id="r",
            choice=0,
            token_id=7,
            text=text,
            logprob=-0.5,
            num_generated_tokens=number,
            finish_reason=reason if number == len(texts) else None,
        )
        out += parsed.renderer.feed(0, [event])
    return out + parsed.renderer.finish()


def choice_of(parsed: ParsedCall, texts: list[str], reason: FinishReason = FinishReason.EOS) -> Any:
    return json.loads(answered(parsed, texts, reason))["choices"][0]


def chunks_of(body: bytes) -> list[Any]:
    frames = body.decode().split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    return [json.loads(frame[6:])["choices"][0] for frame in frames[:-2]]


def test_a_template_with_a_place_for_tools_gets_them() -> None:
    assert f"Tools: {json.dumps(TOOLS, ensure_ascii=False)}" in prompt_of(HERMES)
    assert "Tools:" not in prompt_of(HERMES, tool_choice="none")
    assert "Tools:" not in prompt_of(HERMES, tools=[])


def test_a_template_without_one_gets_them_as_text() -> None:
    system = {"role": "system", "content": "Be brief."}
    for messages in (MESSAGES, [system, *MESSAGES]):
        prompt = prompt_of(PLAIN, messages=messages)
        assert prompt.startswith("[system]")
        assert prompt.count("[system]") == 1
        assert json.dumps(WEATHER["function"]) in prompt
        assert prompt.endswith("[user]Go")
    assert "Be brief.\n\n" in prompt
    assert prompt_of(PLAIN, tool_choice="none") == "[user]Go"


def test_calls_and_results_of_the_history_become_text_without_a_place_for_them() -> None:
    function = {"name": "weather", "arguments": '{"city": "Ulm"}'}
    history = [
        *MESSAGES,
        {
            "role": "assistant",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    prompt = prompt_of(PLAIN, messages=history, tools=None)
    assert prompt == (
        '[user]Go[assistant]<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n'
        "</tool_call>[user]<tool_response>\nrain\n</tool_response>"
    )
    assert "[tool]rain" in prompt_of(HERMES, messages=history, tools=None)


def test_only_enforced_choices_have_a_grammar() -> None:
    assert parse().requests[0].params.grammar is None
    assert parse(tool_choice="auto").requests[0].params.grammar is None
    assert parse(tool_choice="none").requests[0].params.grammar is None
    assert parse(tool_choice="required").requests[0].params.grammar is not None


TOKENIZER = Tokenizer.load(MODEL_DIR)
LIBRARY = GuidanceLibrary(TOKENIZER, vocab_size=TOKENIZER.num_tokens, eos_token_ids=[5])
ULM = '"weather", "{}": {{"city":"Ulm","days":2}}}}'


def follows(text: str, **fields: Any) -> bool:
    """Whether a text is what an enforced choice allows, and complete."""
    template = fields.pop("template", HERMES)
    grammar = parse(template, **fields).requests[0].params.grammar
    assert grammar is not None
    matcher = LIBRARY.compile(grammar).matcher()
    try:
        for token_id in TOKENIZER.encode_now(text, add_special_tokens=False):
            matcher.accept(token_id)
        matcher.accept(5)
    except UserError:
        return False
    return True


def test_enforced_calls() -> None:
    ulm = '<tool_call>\n{"name": ' + ULM.format("arguments") + "\n</tool_call>"
    now = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    named = {"type": "function", "function": {"name": "weather"}}
    assert follows(ulm, tool_choice="required")
    assert follows(now, tool_choice="required")
    assert follows(f"{ulm}\n{now}", tool_choice="required")
    assert not follows(f"{ulm}\n{now}", tool_choice="required", parallel_tool_calls=False)
    assert follows(ulm, tool_choice=named)
    assert not follows(now, tool_choice=named)
    assert not follows(ulm.replace("2", "12"), tool_choice=named)
    assert not follows("No.", tool_choice="required")
    bare = '{"name": ' + ULM.format("parameters")
    assert follows(bare, tool_choice="required", template=LLAMA)
    assert not follows(ulm, tool_choice="required", template=LLAMA)


def test_the_configured_style_is_enforced() -> None:
    template = ChatTemplate.load(MODEL_DIR, tool_form=LLAMA_FORM)
    assert template is not None
    text = '{"name": ' + ULM.format("parameters")
    assert follows(text, tool_choice="required", template=template)
    model = {"default": "{{ tools }}"}
    assert ChatTemplate(model, tool_form=LLAMA_FORM).tool_form is LLAMA_FORM
    assert ChatTemplate(model).tool_form is FORMS["hermes"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": [{}]}, r"tools\[0\] must be"),
        ({"tools": [{"type": "other", "function": {"name": "f"}}]}, r"tools\[0\] must be"),
        ({"tools": [{"function": {"name": "a b"}}]}, r"tools\[0\].function.name must be"),
        ({"tools": [NOW, NOW]}, "'now' twice"),
        ({"tools": [{"function": {"name": "f", "parameters": 3}}]}, "must be a JSON schema object"),
        ({"tools": [NOW] * 129}, "at most 128"),
        ({"tool_choice": "some"}, "tool_choice must be auto, none, required"),
        ({"tool_choice": 3}, "tool_choice must be"),
        ({"tool_choice": {"function": {"name": "x"}}}, r"'x', which is not .* \(weather, now\)"),
        ({"tools": [], "tool_choice": "required"}, "there are no tools"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [None]}}},
            "tool_choice.allowed_tools must be",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": 3}]},
            r"\[0\].tool_calls must be a list",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": []}]}]},
            r"messages\[0\].tool_calls\[0\] must be",
        ),
        ({"functions": [{}]}, "functions are not available"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_tools(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse(**fields)


CALL = [
    "See:",
    " <tool",
    '_call>{"name": "now", "argu',
    'ments": {"a',
    '": 1}}',
    "</tool_call>",
    "",
]


def test_a_whole_answer_with_calls() -> None:
    choice = choice_of(parse(), CALL)
    [call] = choice["message"]["tool_calls"]
    assert choice["message"]["content"] == "See: "
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
    assert choice["finish_reason"] == "tool_calls"


def test_a_whole_answer_without_calls() -> None:
    choice = choice_of(parse(), ["Hel", "lo"])
    assert choice["message"] == {"role": "assistant", "content": "Hello"}
    assert choice["finish_reason"] == "stop"
    assert choice_of(parse(), CALL[1:])["message"]["content"] == " "
    assert choice_of(parse(), CALL[2:4], FinishReason.LENGTH)["finish_reason"] == "length"
    # Without tools nothing is looked for.
    text = choice_of(parse(tools=None), CALL)["message"]["content"]
    assert text == "".join(CALL)


def test_a_streamed_answer_with_calls() -> None:
    chunks = chunks_of(answered(parse(stream=True), CALL))
    deltas = [chunk["delta"] for chunk in chunks]
    start = deltas[2]["tool_calls"][0]
    assert start.pop("id").startswith("call_")
    assert deltas == [
        {"role": "assistant", "content": "See:"},
        {"content": " "},
        {
            "tool_calls": [
                {"index": 0, "type": "function", "function": {"name": "now", "arguments": ""}}
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '": 1}'}}]},
        {},
    ]
    assert [chunk["finish_reason"] for chunk in chunks] == [None] * 5 + ["tool_calls"]


def test_a_streamed_answer_that_begins_with_a_call_has_no_content() -> None:
    texts = ["<tool_call>", *CALL[3:]]
    texts[1] = '{"name": "now", "arguments": {"a'
    [first, *_] = chunks_of(answered(parse(stream=True), texts))
    assert first["delta"]["role"] == "assistant"
    assert first["delta"]["content"] is None
    assert first["delta"]["tool_calls"][0]["function"]["name"] == "now"


def test_log_probabilities_are_reported_once_per_token() -> None:
    for texts in (CALL, ["", "", "x"]):
        body = answered(parse(stream=True, logprobs=True), texts)
        logprobs = [chunk["logprobs"] for chunk in chunks_of(body) if chunk["logprobs"]]
        assert len(logprobs) == len(texts)


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message["tool_calls"]
    ]


def test_enforced_calls_are_valid_in_every_dialect() -> None:
    async def use(served: Any) -> None:
        for path in ("/openai/v1/chat/completions", "/invocations"):
            for seed in range(4):
                choice = [{"type": "function", "function": {"name": "weather"}}, "required"][
                    seed % 2
                ]
                body = {
                    "messages": MESSAGES,
                    "tools": TOOLS,
                    "tool_choice": choice,
                    "parallel_tool_calls": False,
                    "seed": seed,
                    **HOT,
                }
                [answer] = loaded(await served.post(body, path))["choices"]
                assert answer["finish_reason"] == "tool_calls"
                assert answer["message"]["content"] is None
                [(name, arguments)] = calls_of(answer["message"])
                assert name == "weather" or seed % 2
                jsonschema.validate(arguments, SCHEMAS[name])

    run(use, api="lmi")


def test_grammars_of_calls_are_understood_by_the_parser() -> None:
    """What any form's grammar lets through is found again."""
    from lmi_core.engine.engine import Engine
    from lmi_core.engine.sampling_params import SamplingParams
    from tests.engine.harness import collect, text
    from tests.structured.test_engine import demo_config

    async def use() -> None:
        tools = [tool_of(tool) for tool in TOOLS]
        async with Engine(demo_config()) as engine:
            for form in FORMS.values():
                grammar = call_grammar(tools, form, is_parallel=False)
                for seed in range(3):
                    params = SamplingParams(
                        grammar=grammar, temperature=1.5, seed=seed, max_new_tokens=200
                    )
                    written = text(await collect(engine, "A", params))
                    schemas = {tool.name: tool.parameters for tool in tools}
                    parser = TextParser([form.parse(True)], schemas)
                    pieces = parser.push(written) + parser.flush()
                    assert parser.num_calls == 1, written
                    arguments = "".join(piece.text for piece in pieces[1:])  # type: ignore[union-attr]
                    json.loads(arguments)

    asyncio.run(use())
