"""Chat templates render as transformers renders them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jinja2
import pytest

from lmi_core.errors import ModelError, UserError
from lmi_core.text.chat import ChatTemplate
from tests.text.chat_templates import CONVERSATIONS, FAMILIES, TOOL

TAGGED = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if loop.index0 == 0 and message.role == 'system' %}
        {{- '<<' + message.content | trim + '>>\n' }}
        {%- continue %}
    {%- endif %}
    {{- '<|' + message.role + '|>' + message.content + eos_token + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}
"""
ALTERNATING = """\
{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set messages = \
messages[1:] %}{% endif %}{% for m in messages %}{% if (m['role'] == 'user') \
!= (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}\
[{{ m['role'][0] }}] {{ m['content'] }}
{% endfor %}{{ system }}"""
TOOLS = """\
{% if tools %}
Tools: {{ tools | tojson(indent=2) }}
{% endif %}
{% for m in messages %}
  {% if m.tool_calls is defined %}
call {{ m.tool_calls[0].function | tojson }}
  {% else %}
{{ m.role }}: {{ m.content }}
  {% endif %}
{% endfor %}
"""
DOCUMENTS = (
    "{% for d in documents %}[{{ d.title }}] {{ d.text }}\n{% endfor %}{{ messages[0].content }}"
)
THINKING = """\
{% for m in messages %}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>\
{% endif %}{{ m.content }};{% endfor %}{% if enable_thinking is defined and not enable_thinking %}\
<think></think>{% endif %}"""
GENERATION = """\
{% for m in messages %}
{% if m.role == 'assistant' %}
{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}

{% else %}
{{ m.content }}
{% endif %}
{% endfor %}
"""
NAMESPACE = """\
{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}\
{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{{ m.content }}\
{% if loop.index0 == ns.last %}!{% break %}{% endif %}{% endfor %}"""
PARTS = """\
{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}\
{% for p in m.content %}{{ p.text if p.type == 'text' else '<image>' }}{% endfor %}{% endif %}\
|{% endfor %}"""
DATED = "{{ strftime_now('%Y') }} {{ messages | length }} {{ messages[0] | items | list }}"

CHAT = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "Où est <b>'le' renard</b>?"},
    {"role": "assistant", "content": "Là.", "reasoning": "hm"},
    {"role": "user", "content": "漢字 & more"},
]
ODD_TOOL = {"type": "function", "function": {"name": "é", "parameters": {"b": [1], "a": None}}}
TOOL_CHAT = [
    {"role": "user", "content": "go"},
    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": "é<"}}}]},
]
PARTS_CHAT = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]},
    {"role": "assistant", "content": "that"},
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

CASES: list[tuple[str, str, list[dict[str, Any]], dict[str, Any]]] = [
    ("tagged", TAGGED, CHAT, {}),
    ("tagged without prompt", TAGGED, CHAT, {"add_generation_prompt": False}),
    ("system merging", ALTERNATING, CHAT, {}),
    ("tools", TOOLS, TOOL_CHAT, {"tools": [ODD_TOOL]}),
    ("no tools", TOOLS, CHAT, {}),
    ("documents", DOCUMENTS, CHAT, {"documents": [{"title": "t", "text": "x"}]}),
    ("thinking", THINKING, CHAT, {"enable_thinking": False}),
    ("generation tag", GENERATION, CHAT, {}),
    ("namespace and break", NAMESPACE, CHAT, {}),
    ("parts", PARTS, PARTS_CHAT, {}),
    ("date and items", DATED, CHAT, {}),
    ("continue", TAGGED, CHAT[:3], {"continue_final_message": True}),
    ("continue parts", PARTS, PARTS_CHAT[:1], {"continue_final_message": True}),
]


@pytest.mark.parametrize(
    ("template", "messages", "options"),
    [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_equals_transformers(
    template: str, messages: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    reference = pytest.importorskip("transformers.utils.chat_template_utils")
    asked = {"add_generation_prompt": True, **options}
    expected_options = dict(asked)
    if options.get("continue_final_message"):
        expected_options["add_generation_prompt"] = False
    expected = reference.render_jinja_template(
        [messages], chat_template=template, **expected_options, **TOKENS
    )[0][0]
    assert ChatTemplate({"default": template}, TOKENS).render(messages, **asked) == expected


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_families_equal_transformers(family: str, conversation: str) -> None:
    """The same text, or a refusal where transformers refuses."""
    reference = pytest.importorskip("transformers.utils.chat_template_utils")
    messages, template = CONVERSATIONS[conversation], FAMILIES[family]
    for options in (
        {"add_generation_prompt": True},
        {"add_generation_prompt": False, "tools": [TOOL, TOOL]},
        {"add_generation_prompt": True, "enable_thinking": False, "date_string": "2 Feb 2026"},
    ):
        try:
            [expected], _ = reference.render_jinja_template(
                [messages], chat_template=template, **options, **TOKENS
            )
        except (jinja2.TemplateError, TypeError) as error:
            expected = str(error)
            with pytest.raises(UserError, match=re.escape(expected)):
                ChatTemplate({"default": template}, TOKENS).render(messages, **options)
        else:
            assert (
                ChatTemplate({"default": template}, TOKENS).render(messages, **options) == expected
            )
            assert expected or not messages


def test_refusal_of_the_template_is_the_users_error() -> None:
    template = ChatTemplate({"default": ALTERNATING})
    with pytest.raises(UserError, match="roles must alternate"):
        template.render([{"role": "assistant", "content": "x"}])


def test_broken_template_is_the_models_error() -> None:
    with pytest.raises(ModelError, match="line 1"):
        ChatTemplate({"default": "{% if %}"}).render([])


def test_faults_are_known_before_a_chat_comes() -> None:
    assert ChatTemplate({"default": TAGGED, "tool_use": TOOLS}).faults() == []
    [fault] = ChatTemplate({"default": "a\n{% if %}"}).faults()
    assert fault.startswith("The chat template is broken: line 2: ")
    [fault] = ChatTemplate({"default": "x", "tool_use": "{{ 'a' | no_such }}"}).faults()
    assert "no_such" in fault
    assert fault.endswith("(template tool_use)")
    [fault] = ChatTemplate({"rag": "x"}).faults()
    assert fault == "The model has no default chat template, only rag"


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__ }}{{ messages.append(1) }}",
        "{{ ().__class__.__bases__[0].__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% set _ = messages.append(1) %}",
    ],
)
def test_sandbox(attack: str) -> None:
    with pytest.raises(UserError):
        ChatTemplate({"default": attack}).render([{"role": "user", "content": "x"}])


def test_missing_fields_render_empty_or_fail_cleanly() -> None:
    template = ChatTemplate({"default": "{{ messages[0].role + messages[0].content }}"})
    with pytest.raises(UserError):
        template.render([{"role": "user"}])


@pytest.mark.parametrize("source", ["{% for i in range(10 ** 9) %}{% endfor %}", "{{ 1 // 0 }}"])
def test_a_template_that_fails_in_any_way_is_no_fault_of_ours(source: str) -> None:
    with pytest.raises(UserError, match=r"fails on these messages: (Overflow|ZeroDivision)Error: "):
        ChatTemplate({"default": source}).render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("value", [5, [{"name": "default"}], ["x"], [{"name": "a", "template": 1}]])
def test_a_template_of_another_type_names_the_file(tmp_path: Path, value: object) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: chat_template must be"):
        ChatTemplate.load(tmp_path)


def test_load(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    config = {
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "chat_template": [
            {"name": "default", "template": "{{ bos_token }}plain{{ eos_token }}"},
            {"name": "tool_use", "template": "tools"},
        ],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render([]) == "<s>plain</s>"
    assert template.render([], tools=[]) == "tools"
    (tmp_path / "chat_template.jinja").write_text("from the file {{ bos_token }}")
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render([]) == "from the file <s>"
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        ChatTemplate.load(tmp_path)


def test_continue_needs_text() -> None:
    with pytest.raises(UserError, match="no text in the last message"):
        ChatTemplate({"default": "x"}).render([], continue_final_message=True)
    with pytest.raises(UserError, match="drops the last message"):
        ChatTemplate({"default": "x"}).render(
            [{"role": "user", "content": "y"}], continue_final_message=True
        )
