"""Tool calls that are written as Python: ``[f(a=1), g(b="x")]``, or lines between fences."""

from __future__ import annotations

import ast
import json
import re

from lmi_core.tools.reader import Parse, Reader, Steps

_HEAD = re.compile(r"[A-Za-z_][\w.]*\s*\(")
_PART_OF_HEAD = re.compile(r"(?:[A-Za-z_][\w.]*\s*)?")
_MAX_NAME_CHARS = 80
_MAX_CALL_CHARS = 64 * 1024
_CONSTANTS = {"true": True, "false": False, "null": None}


def bare_calls(tags: tuple[str, ...]) -> Parse:
    """A text that is a list of calls, or one object of name and parameters after the other; tags
    around it are left out."""

    def parse(reader: Reader) -> Steps[None]:
        before = yield from reader.blanks()
        while tag := (yield from reader.starts_with(*tags)):
            before += tag + (yield from reader.blanks())
        if (yield from reader.starts_with("[")):
            if (yield from _calls(reader, f"{before}[", ",")):
                yield from reader.starts_with("]")
        elif (yield from reader.starts_with("{")):
            reader.held = "{" + reader.held
            while (yield from reader.call_object(before, is_bare=True)):
                before = yield from reader.blanks()
                before += yield from reader.starts_with(";", ",")
                before += yield from reader.blanks()
                if not reader.held.startswith("{"):
                    reader.content(before)
                    break
        else:
            reader.content("" if before.strip() else before)
        while (yield from reader.show_until(reader.content, *tags)):
            pass

    return parse


def fenced_python_calls(begin: str, end: str) -> Parse:
    """Calls on lines of their own between two fences."""

    def parse(reader: Reader) -> Steps[None]:
        while (yield from reader.show_until(reader.content, begin)):
            before = begin + (yield from reader.blanks())
            if (yield from _calls(reader, before, "\n")):
                yield from reader.starts_with(end)

    return parse


def _calls(reader: Reader, before: str, separator: str) -> Steps[bool]:
    """Calls with separators between them. What is none becomes content after ``before``, which
    was read before it; then False."""
    while True:
        call = yield from _call_text(reader)
        known = _arguments(call)
        if known is None or known[0] not in reader.tools:
            reader.content(before + call)
            return False
        reader.start(known[0])
        reader.arguments(known[1])
        before = yield from reader.blanks()
        if separator == "\n":
            if not reader.held or reader.held.startswith("`"):
                return True
        elif not (yield from reader.starts_with(separator)):
            return True
        else:
            before += separator + (yield from reader.blanks())


def _call_text(reader: Reader) -> Steps[str]:
    """Consume a call to its closing parenthesis; less where it turns out to be none."""
    while _HEAD.match(reader.held) is None:
        undecided = _PART_OF_HEAD.fullmatch(reader.held) and len(reader.held) < _MAX_NAME_CHARS
        if not undecided or not (yield from reader.more()):
            return ""
    text, depth, quote, is_escaped = "", 0, "", False
    while True:
        for number, char in enumerate(reader.held):
            if quote:
                if not is_escaped and char == quote:
                    quote = ""
                is_escaped = char == "\\" and not is_escaped
            elif char in "'\"":
                quote = char
            elif char in "([{":
                depth += 1
            elif char in ")]}":
                depth -= 1
            is_too_long = len(text) + number >= _MAX_CALL_CHARS
            if (depth == 0 and char == ")" and not quote) or is_too_long:
                text += reader.held[: number + 1]
                reader.held = reader.held[number + 1 :]
                return text
        text += reader.held
        reader.held = ""
        if not (yield from reader.more()):
            return text


def _arguments(text: str) -> tuple[str, str] | None:
    """Name and arguments as JSON; None for what isn't a call with constants by their names."""
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        arguments = {
            keyword.arg: ast.literal_eval(_WithJsonNames().visit(keyword.value))
            for keyword in call.keywords
        }
        if None in arguments:
            return None
        name = ast.unparse(call.func)
        return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


class _WithJsonNames(ast.NodeTransformer):
    """JSON's names of constants, which models write as well."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(_CONSTANTS[node.id]) if node.id in _CONSTANTS else node
