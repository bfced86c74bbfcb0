"""The forms in which model families write tool calls: how they are read, and how one is written.

Forms are those of the families' chat templates and model cards, under vLLM's names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lmi_core.tools.calls import BEGIN, END, ToolCallParser
from lmi_core.tools.python_calls import bare_calls, fenced_python_calls
from lmi_core.tools.reader import Parse, Reader, Steps


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


def _tagged(is_enforced: bool) -> Parse:
    return _hermes(needs_tags=is_enforced)


def _hermes(*, needs_tags: bool) -> Parse:
    """Hermes's and Llama 3's, which have a parser of their own."""

    def parse(reader: Reader) -> Steps[None]:
        parser = ToolCallParser(reader.tools.keys(), needs_tags=needs_tags)
        while True:
            reader.put(parser.push(reader.take()), parser.num_calls)
            if not (yield from reader.more()):
                reader.put(parser.flush(), parser.num_calls)
                return

    return parse


def _objects(*begins: str, end: str = "") -> Callable[[bool], Parse]:
    """After a mark, an object of name and arguments, or a list of such."""

    def parse(reader: Reader) -> Steps[None]:
        while mark := (yield from reader.show_until(reader.content, *begins)):
            if (yield from reader.call_list(mark)) and end:
                yield from reader.blanks()
                yield from reader.starts_with(end)

    return lambda _: parse


def _named(
    begin: str, name_of: Callable[[str], str], *, end: str = "", hidden: tuple[str, ...] = ()
) -> Callable[[bool], Parse]:
    """After a mark, what holds the name, then the arguments' object, then another mark."""

    def parse(reader: Reader) -> Steps[None]:
        while mark := (yield from reader.show_until(reader.content, begin, *hidden)):
            if mark != begin:
                continue
            stops = (end,) if end else ()
            head, stop = yield from reader.read_until("{", *stops)
            name = name_of(head)
            if stop != "{" or not name:
                reader.content(mark + head + (stop or ""))
                continue
            reader.held = stop + reader.held
            reader.start(name)
            if (yield from reader.value(reader.arguments)) and end:
                yield from reader.read_until(end)

    return lambda _: parse


def _mistral(reader: Reader) -> Steps[None]:
    """A list of objects, or since 2025 names with arguments, each behind the mark."""
    while mark := (yield from reader.show_until(reader.content, "[TOOL_CALLS]")):
        before = mark + (yield from reader.blanks())
        if (yield from reader.starts_with("[")):
            reader.held = "[" + reader.held
            yield from reader.call_list(before)
            continue
        head, stop = yield from reader.read_until("{")
        name = head.partition("[")[0].strip()
        if stop is None or not name:
            reader.content(before + head + (stop or ""))
            continue
        reader.held = stop + reader.held
        reader.start(name)
        yield from reader.value(reader.arguments)


def _deepseek_name(head: str) -> str:
    kind, _, rest = head.partition("<\uff5ctool▁sep\uff5c>")
    return (rest.partition("\n")[0] if kind.strip() == "function" else kind).strip()


def _kimi_name(head: str) -> str:
    name = head.partition("<|")[0].strip().removeprefix("functions.")
    return re.sub(r":\d+$", "", name)


def _glm(reader: Reader) -> Steps[None]:
    """The name, then keys and values in tags."""
    while (yield from reader.show_until(reader.content, BEGIN)):
        head, mark = yield from reader.read_until("<arg_key>", END)
        if mark is None or not head.strip():
            reader.content(BEGIN + head + (mark or ""))
            continue
        name = head.strip()
        reader.start(name)
        while mark == "<arg_key>":
            key, _ = yield from reader.read_until("</arg_key>")
            yield from reader.read_until("<arg_value>")
            value, closed = yield from reader.read_until("</arg_value>")
            if closed is None:
                return
            reader.argument(key.strip(), reader.typed(name, key.strip(), value))
            _, mark = yield from reader.read_until("<arg_key>", END)
        reader.end_arguments()


def _qwen_coder(reader: Reader) -> Steps[None]:
    """``<function=NAME>`` and ``<parameter=KEY>`` tags."""
    while mark := (yield from reader.show_until(reader.content, BEGIN, END, "<function=")):
        if mark != "<function=":
            continue
        name, _ = yield from reader.read_until(">")
        name = name.strip()
        reader.start(name)
        while True:
            _, mark = yield from reader.read_until("<parameter=", "</function>")
            if mark != "<parameter=":
                break
            key, _ = yield from reader.read_until(">")
            value, closed = yield from reader.read_until("</parameter>")
            if closed is None:
                return
            value = value.removeprefix("\n").removesuffix("\n")
            reader.argument(key.strip(), reader.typed(name, key.strip(), value))
        if mark is not None:
            reader.end_arguments()


def _function_gemma(reader: Reader) -> Steps[None]:
    """``call:NAME{key:value,...}``, texts between ``<escape>``."""
    begin, end, escape = "<start_function_call>", "<end_function_call>", "<escape>"
    while (yield from reader.show_until(reader.content, begin)):
        head, mark = yield from reader.read_until("{", end)
        name = head.strip().removeprefix("call:").strip()
        if mark != "{" or not name:
            reader.content(begin + head + (mark or ""))
            continue
        reader.start(name)
        while True:
            key, mark = yield from reader.read_until(":", end)
            if mark != ":":
                break
            key = key.strip(" ,\n}")
            if (yield from reader.starts_with(escape)):
                value, mark = yield from reader.read_until(escape)
                reader.argument(key, value)
            else:
                value, mark = yield from reader.read_until(",", end)
                plain = value.strip().removesuffix("}") if mark == end else value.strip()
                reader.argument(key, reader.typed(name, key, plain))
            if mark in (end, None):
                break
        if mark is not None:
            reader.end_arguments()


def _harmony(reader: Reader) -> Steps[None]:
    """Messages with a channel each: analysis is reasoning, a recipient makes a call."""
    bodies = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
    begun = yield from reader.starts_with("<|channel|>", "<|start|>", "<|message|>", " to=")
    if not begun:
        return
    reader.held = begun + reader.held
    while True:
        head, mark = yield from reader.read_until("<|message|>")
        if mark is None:
            reader.content("" if "<|" in head else head)
            return
        to = re.search(r"to=(?:functions\.)?([\w.-]+)", head)
        channel = re.search(r"<\|channel\|>\s*(\w+)", head)
        show = reader.content
        if to is not None:
            reader.start(to[1])
            show = reader.arguments
        elif channel is not None and channel[1] == "analysis":
            show = reader.reasoning
        if (yield from reader.show_until(show, *bodies)) is None:
            return


def _always(parse: Parse) -> Callable[[bool], Parse]:
    return lambda _: parse


def _or_hermes(parse: Parse) -> Callable[[bool], Parse]:
    """For forms whose arguments aren't JSON: enforced calls are written in Hermes's."""
    return lambda is_enforced: _hermes(needs_tags=True) if is_enforced else parse


_OBJECT = '{"name": "NAME", "arguments": '
_TAGGED = Written(head=f"{BEGIN}\n{_OBJECT}", tail=f"}}\n{END}", between="\n")
_LLAMA = Written(head='{"name": "NAME", "parameters": ', tail="}")
_PYTHON_TAGS = ("<|python_start|>", "<|python_end|>", "<|python_tag|>")


def _listed(name: str, begin: str, end: str, opening: str = "", head: str = _OBJECT) -> ToolForm:
    """A list of objects between two marks."""
    return ToolForm(
        name=name,
        parse=_objects(begin, end=end),
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
        parse=_named(marks[2], _deepseek_name, end=marks[3], hidden=marks[:2]),
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
    ToolForm(name="hermes", parse=_tagged, written=_TAGGED, marks=(BEGIN, END), opening=BEGIN),
    ToolForm(
        name="llama3_json",
        parse=lambda _: _hermes(needs_tags=False),
        written=_LLAMA,
        marks=("<|python_tag|>",),
    ),
    ToolForm(
        name="llama4_pythonic",
        parse=_or_hermes(bare_calls(_PYTHON_TAGS)),
        written=_TAGGED,
        marks=_PYTHON_TAGS,
    ),
    ToolForm(
        name="mistral",
        parse=_always(_mistral),
        written=Written(begin="[TOOL_CALLS][", head=_OBJECT, tail="}", between=", ", end="]"),
        marks=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        opening="[TOOL_CALLS]",
    ),
    _listed("granite", "<|tool_call|>", ""),
    _listed("jamba", "<tool_calls>", "</tool_calls>"),
    ToolForm(
        name="phi4_mini_json",
        parse=_objects("functools", "<|tool_call|>", end="<|/tool_call|>"),
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
        parse=_objects(
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
        parse=_named(_KIMI[2], _kimi_name, end=_KIMI[4], hidden=_KIMI[:2]),
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
        parse=_always(_harmony),
        written=Written(
            head="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>"
        ),
        marks=("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>"),
        opening="<|channel|>commentary",
        has_reasoning=True,
    ),
    ToolForm(name="glm45", parse=_or_hermes(_glm), written=_TAGGED, marks=(BEGIN, END)),
    ToolForm(
        name="qwen3_coder", parse=_or_hermes(_qwen_coder), written=_TAGGED, marks=(BEGIN, END)
    ),
    ToolForm(
        name="gemma",
        parse=_or_hermes(fenced_python_calls("```tool_code", "```")),
        written=_TAGGED,
    ),
    ToolForm(
        name="functiongemma",
        parse=_or_hermes(_function_gemma),
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
