"""The forms in which model families write tool calls: how they are read, and how one is written.

Forms are those of the families' chat templates and model cards, under vLLM's names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lmi_core.tools.calls import BEGIN, END
from lmi_core.tools.form_parsers import (
    always,
    deepseek_name,
    function_gemma,
    glm,
    harmony,
    hermes,
    kimi_name,
    mistral,
    named,
    objects,
    or_hermes,
    qwen_coder,
    tagged,
)
from lmi_core.tools.python_calls import bare_calls, fenced_python_calls
from lmi_core.tools.reader import Parse


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """How a text of calls is written; NAME stands for the tool's name in ``head``."""

    begin: str = ""
    head: str
    """Before the arguments' JSON."""
    tail: str = ""
    between: str | None = None
    """Between two calls; None: a text has one."""
    end: str = ""

    def head_of(self, name: str) -> str:
        return self.head.replace("NAME", name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolForm:
    """A family's form."""

    name: str
    parse: Callable[[bool], Parse]
    """The parser; with True, of text that a grammar has kept to ``written``."""
    written: Written
    """What enforced calls look like."""
    marks: tuple[str, ...] = ()
    """Texts that may be special tokens, which the parser has to see."""
    opening: str = ""
    """What a call begins with wherever it comes; empty: only the first text can be one."""
    has_reasoning: bool = False
    """The parser finds the reasoning, too."""

    def __reduce__(self) -> tuple[Callable[[str], ToolForm], tuple[str]]:
        """There is one of each name."""
        return form_named, (self.name,)


_OBJECT = '{"name": "NAME", "arguments": '
_TAGGED = Written(head=f"{BEGIN}\n{_OBJECT}", tail=f"}}\n{END}", between="\n")
_LLAMA = Written(head='{"name": "NAME", "parameters": ', tail="}")
_PYTHON_TAGS = ("<|python_start|>", "<|python_end|>", "<|python_tag|>")


def _listed(name: str, begin: str, end: str, opening: str = "", head: str = _OBJECT) -> ToolForm:
    """A list of objects between two marks."""
    return ToolForm(
        name=name,
        parse=objects(begin, end=end),
        written=Written(begin=f"{begin}[", head=head, tail="}", between=", ", end=f"]{end}"),
        marks=(begin, end) if end else (begin,),
        opening=opening or begin,
    )


def _deepseek(name: str, head: str, tail: str) -> ToolForm:
    def mark(text: str) -> str:
        return f"<\uff5ctool▁{text}\uff5c>"

    marks = tuple(map(mark, ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")))
    return ToolForm(
        name=name,
        parse=named(marks[2], deepseek_name, end=marks[3], hidden=marks[:2]),
        written=Written(
            begin=marks[0],
            head=marks[2] + head.replace("SEP", marks[4]),
            tail=tail + marks[3],
            between="\n" if tail else "",
            end=marks[1],
        ),
        marks=marks,
        opening=marks[0],
    )


_KIMI = tuple(
    f"<|tool_{part}|>"
    for part in (
        "calls_section_begin",
        "calls_section_end",
        "call_begin",
        "call_argument_begin",
        "call_end",
    )
)

_ALL = (
    ToolForm(name="hermes", parse=tagged, written=_TAGGED, marks=(BEGIN, END), opening=BEGIN),
    ToolForm(
        name="llama3_json",
        parse=lambda _: hermes(needs_tags=False),
        written=_LLAMA,
        marks=("<|python_tag|>",),
    ),
    ToolForm(
        name="llama4_pythonic",
        parse=or_hermes(bare_calls(_PYTHON_TAGS)),
        written=_TAGGED,
        marks=_PYTHON_TAGS,
    ),
    ToolForm(
        name="mistral",
        parse=always(mistral),
        written=Written(begin="[TOOL_CALLS][", head=_OBJECT, tail="}", between=", ", end="]"),
        marks=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        opening="[TOOL_CALLS]",
    ),
    _listed("granite", "<|tool_call|>", ""),
    _listed("jamba", "<tool_calls>", "</tool_calls>"),
    ToolForm(
        name="phi4_mini_json",
        parse=objects("functools", "<|tool_call|>", end="<|/tool_call|>"),
        written=Written(begin="functools[", head=_OBJECT, tail="}", between=", ", end="]"),
        marks=("<|tool_call|>", "<|/tool_call|>"),
        opening="functools",
    ),
    _listed(
        "cohere_command3",
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        head='{"tool_call_id": "0", "tool_name": "NAME", "parameters": ',
    ),
    ToolForm(
        name="internlm",
        parse=objects(
            "<|action_start|><|plugin|>", "<|action_start|> <|plugin|>", end="<|action_end|>"
        ),
        written=Written(
            begin="<|action_start|><|plugin|>", head=_LLAMA.head, tail="}", end="<|action_end|>"
        ),
        marks=("<|action_start|>", "<|plugin|>", "<|action_end|>"),
        opening="<|action_start|><|plugin|>",
    ),
    _deepseek("deepseek_v3", "functionSEPNAME\n```json\n", "\n```"),
    _deepseek("deepseek_v31", "NAMESEP", ""),
    ToolForm(
        name="kimi_k2",
        parse=named(_KIMI[2], kimi_name, end=_KIMI[4], hidden=_KIMI[:2]),
        written=Written(
            begin=_KIMI[0],
            head=f"{_KIMI[2]}functions.NAME:0{_KIMI[3]}",
            tail=_KIMI[4],
            between="",
            end=_KIMI[1],
        ),
        marks=_KIMI,
        opening=_KIMI[0],
    ),
    ToolForm(
        name="openai",
        parse=always(harmony),
        written=Written(
            head="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>"
        ),
        marks=("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>"),
        opening="<|channel|>commentary",
        has_reasoning=True,
    ),
    ToolForm(name="glm45", parse=or_hermes(glm), written=_TAGGED, marks=(BEGIN, END)),
    ToolForm(name="qwen3_coder", parse=or_hermes(qwen_coder), written=_TAGGED, marks=(BEGIN, END)),
    ToolForm(
        name="gemma",
        parse=or_hermes(fenced_python_calls("```tool_code", "```")),
        written=_TAGGED,
    ),
    ToolForm(
        name="functiongemma",
        parse=or_hermes(function_gemma),
        written=_TAGGED,
        marks=("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
)
FORMS: Mapping[str, ToolForm] = {form.name: form for form in _ALL}
HERMES, LLAMA = FORMS["hermes"], FORMS["llama3_json"]
ALIASES = {
    "llama4_json": "llama3_json",
    "pythonic": "llama4_pythonic",
    "qwen3_xml": "qwen3_coder",
    "command_r": "cohere_command3",
    "granite-20b-fc": "granite",
    "gpt_oss": "openai",
}
"""Other names of forms, or of such as are read by the same parser."""

_SHOWN_BY = (
    ("<|channel|>", "openai"),
    ("function<\uff5ctool▁sep\uff5c>", "deepseek_v3"),
    ("<\uff5ctool▁sep\uff5c>", "deepseek_v31"),
    ("[TOOL_CALLS]", "mistral"),
    (_KIMI[0], "kimi_k2"),
    ("<arg_key>", "glm45"),
    ("<parameter=", "qwen3_coder"),
    ("<|START_ACTION|>", "cohere_command3"),
    ("<|action_start|>", "internlm"),
    ("<start_function_call>", "functiongemma"),
    ("<|/tool_call|>", "phi4_mini_json"),
    ("functools", "phi4_mini_json"),
    ("<|tool_call|>", "granite"),
    ("<tool_calls>", "jamba"),
    ("```tool_code", "gemma"),
    ("<|python_start|>", "llama4_pythonic"),
    (BEGIN, "hermes"),
    ("python_tag", "llama3_json"),
)


def form_named(name: str) -> ToolForm:
    return FORMS[ALIASES.get(name, name)]


def form_shown(template: str) -> ToolForm:
    """The form that a chat template's text shows; Hermes's if it shows none."""
    return next((FORMS[name] for mark, name in _SHOWN_BY if mark in template), HERMES)
