"""A text that is calls of tools or an answer by a grammar of its own: its beginning shows which."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lmi_core.structured.grammar import Grammar
from lmi_core.tools.forms import LLAMA, ToolForm
from lmi_core.tools.reader import Parse, Reader, Steps
from lmi_core.tools.tools import JSON_OPTIONS, Tool, call_grammar, fitted, loose


def optional_calls(tools: Sequence[Tool], form: ToolForm, *, is_parallel: bool) -> Grammar:
    """Of a text that is calls: with valid arguments of strict tools, and any objects of others."""
    held = [tool if tool.strict else loose(tool) for tool in tools]
    if form is not LLAMA:
        return call_grammar(held, form, is_parallel=is_parallel)
    # Calls that are bare objects have the lexemes of answers that are: no text begins both.
    one = " | ".join(f"call_{number}" for number in range(len(held)))

    def lines(tools: Sequence[Tool]) -> list[str]:
        calls = [f"call_{number}: %json {_whole(tool)}" for number, tool in enumerate(tools)]
        return [f"start: {one}", *calls]

    return fitted(lines, held)


def parse_optional(tools: Sequence[Tool], form: ToolForm) -> Parse:
    """Of a text that a grammar keeps to such calls or an answer, which is content."""
    parse = form.parse(True)
    if form.has_reasoning:  # its channels tell them apart
        return parse
    written = form.written
    heads = tuple(written.begin + written.head_of(tool.name) for tool in tools)

    def parse_begun(reader: Reader) -> Steps[None]:
        if form is LLAMA:
            begun = yield from _begins_a_call(reader)
        else:
            head = yield from reader.starts_with(*heads)
            reader.held = head + reader.held
            begun = bool(head)
        if begun:
            yield from parse(reader)

    return parse_begun


def _begins_a_call(reader: Reader) -> Steps[bool]:
    """Consumes nothing."""
    while not (call := _CALL.match(reader.held)) and _PART.fullmatch(reader.held):
        if not (yield from reader.more()):
            return False
    return call is not None and call[1] in reader.tools


def _whole(tool: Tool) -> str:
    """The schema of a call as an object."""
    schema = {
        **JSON_OPTIONS,
        "type": "object",
        "properties": {"name": {"const": tool.name}, "parameters": _moved(tool.parameters)},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
    return json.dumps(schema)


def _moved(schema: Any) -> Any:
    """A schema whose references are to its place in the call's."""
    if isinstance(schema, list):
        return [_moved(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {name: _moved(value) for name, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and re.match(r"#(/|$)", reference):
        moved["$ref"] = f"#/properties/parameters{reference[1:]}"
    return moved


def _patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Of the beginning of a call, and of what that may begin with."""
    named = {" ": " ?", "N": r"([\w.-]{1,64})"}
    atoms = [named.get(char) or re.escape(char) for char in '{ "name" : "N" , "parameters" : {']
    part = ""
    for atom in reversed(atoms):
        part = f"(?:{atom}{part})?"
    return re.compile("".join(atoms), re.ASCII), re.compile(part, re.ASCII)


_CALL, _PART = _patterns()
