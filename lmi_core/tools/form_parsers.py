"""How tool calls in the forms of model families are read; forms.py says which form has which."""

from __future__ import annotations

import re
from collections.abc import Callable

from lmi_core.tools.calls import BEGIN, END, ToolCallParser
from lmi_core.tools.reader import Parse, Reader, Steps


def tagged(is_enforced: bool) -> Parse:
    return hermes(needs_tags=is_enforced)


def hermes(*, needs_tags: bool) -> Parse:
    """Hermes's and Llama 3's, which have a parser of their own."""

    def parse(reader: Reader) -> Steps[None]:
        parser = ToolCallParser(reader.tools.keys(), needs_tags=needs_tags)
        while True:
            reader.put(parser.push(reader.take()), parser.num_calls)
            if not (yield from reader.more()):
                reader.put(parser.flush(), parser.num_calls)
                return

    return parse


def objects(*begins: str, end: str = "") -> Callable[[bool], Parse]:
    """After a mark, an object of name and arguments, or a list of such."""

    def parse(reader: Reader) -> Steps[None]:
        while mark := (yield from reader.show_until(reader.content, *begins)):
            if (yield from reader.call_list(mark)) and end:
                yield from reader.blanks()
                yield from reader.starts_with(end)

    return lambda _: parse


def named(
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


def mistral(reader: Reader) -> Steps[None]:
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


def deepseek_name(head: str) -> str:
    kind, _, rest = head.partition("<\uff5ctool▁sep\uff5c>")
    return (rest.partition("\n")[0] if kind.strip() == "function" else kind).strip()


def kimi_name(head: str) -> str:
    name = head.partition("<|")[0].strip().removeprefix("functions.")
    return re.sub(r":\d+$", "", name)


def glm(reader: Reader) -> Steps[None]:
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


def qwen_coder(reader: Reader) -> Steps[None]:
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


def function_gemma(reader: Reader) -> Steps[None]:
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


def harmony(reader: Reader) -> Steps[None]:
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


def always(parse: Parse) -> Callable[[bool], Parse]:
    return lambda _: parse


def or_hermes(parse: Parse) -> Callable[[bool], Parse]:
    """For forms whose arguments aren't JSON: enforced calls are written in Hermes's."""
    return lambda is_enforced: hermes(needs_tags=True) if is_enforced else parse
