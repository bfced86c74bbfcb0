"""Tools that a model may call: what it is told of them, and the grammar of calls it must make."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from lmi_core.structured.grammar import Grammar
from lmi_core.tools.calls import BEGIN, END

_NO_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


class ToolStyle(StrEnum):
    """How a model writes its calls; both styles are understood whichever it is."""

    HERMES = "hermes"
    LLAMA3_JSON = "llama3_json"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function by its name; ``definition`` is the whole object that the request has of it."""

    name: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments."""
    definition: Mapping[str, Any]
    strict: bool = False
    """Whether the arguments must be valid even where the model is free to call or not."""


def tool_of(definition: Mapping[str, Any]) -> Tool:
    """A tool in OpenAI's form, whose shape was checked."""
    function = definition["function"]
    parameters = function.get("parameters") or _NO_PARAMETERS
    return Tool(function["name"], parameters, definition, bool(function.get("strict")))


def call_grammar(tools: Sequence[Tool], style: ToolStyle, *, is_parallel: bool) -> Grammar:
    """Text that is one call of a tool with valid arguments; with ``is_parallel``, or several.

    Llama 3's style has one call.
    """
    call, rules = _call_rules(tools, style)
    if style is ToolStyle.HERMES:
        begin, end = json.dumps(f"{BEGIN}\n"), json.dumps(f"\n{END}")
        start = 'start: tagged ("\\n" tagged)*' if is_parallel else "start: tagged"
        rules = [start, f"tagged: {begin} ({call}) {end}", *rules]
    else:
        rules = [f"start: {call}", *rules]
    return Grammar.lark("\n".join(rules), field="tools")


def free_grammar(tools: Sequence[Tool], style: ToolStyle, *, is_parallel: bool) -> Grammar:
    """Any text, in which every call of a ``strict`` tool has valid arguments.

    The other tools' arguments are any JSON object. In Llama 3's style a text that begins with a
    brace is a call, too.
    """
    call, rules = _call_rules([tool if tool.strict else _loose(tool) for tool in tools], style)
    tagged = f'before ({call}) "\\n"? {json.dumps(END)}'
    # A lazy match ends with the first tag: where a call may come, no text can have one in it.
    free = "tagged* TEXT?" if is_parallel else "tagged | TEXT?"
    text = r"(.|\n)*"
    if style is ToolStyle.LLAMA3_JSON:
        free, text = f"{call} | {free}", r"\s*([^{\s](.|\n)*)?"
    head = [f"start: {free}", f"tagged: {tagged}", 'before: opening "\\n"?']
    terminals = [f"opening[lazy]: /{text}{BEGIN}/", f"TEXT: /{text}/"]
    return Grammar.lark("\n".join([*head, *terminals, *rules]), field="tools")


def _call_rules(tools: Sequence[Tool], style: ToolStyle) -> tuple[str, list[str]]:
    """What stands for a call in a rule, and the rules of each tool's calls."""
    rules = []
    for number, tool in enumerate(tools):
        key = "arguments" if style is ToolStyle.HERMES else "parameters"
        head = json.dumps(f'{{"name": {json.dumps(tool.name)}, "{key}": ')
        schema = json.dumps({"x-guidance": {"whitespace_pattern": "[ ]?"}, **tool.parameters})
        rules.append(f'call_{number}: {head} %json {schema} "}}"')
    return " | ".join(f"call_{number}" for number in range(len(tools))), rules


def _loose(tool: Tool) -> Tool:
    return replace(tool, parameters={"type": "object"})


def instructions(tools: Sequence[Tool]) -> str:
    """What a model is told whose chat template has no place for tools."""
    functions = [json.dumps(tool.definition["function"], ensure_ascii=False) for tool in tools]
    return "\n".join(
        [
            "You may call functions to help the user. These are available, one JSON object each:",
            "<tools>",
            *functions,
            "</tools>",
            "To call one, write its name and its arguments as a JSON object between tags:",
            f'{BEGIN}\n{{"name": "...", "arguments": {{...}}}}\n{END}',
            "The results come back between <tool_response> tags.",
        ]
    )


def with_instructions(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]
) -> list[Mapping[str, Any]]:
    """The messages with ``instructions`` in the system message."""
    told = instructions(tools)
    if messages and messages[0].get("role") == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{told}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": told}, *messages]


def calls_as_text(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages for a template that knows of no calls: they and their results become text."""
    return [_plain(message) for message in messages]


def _plain(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if message.get("role") == "tool":
        content = f"<tool_response>\n{message.get('content', '')}\n</tool_response>"
        return {"role": "user", "content": content}
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [message["content"]] if message.get("content") else []
    for call in calls:
        function = call.get("function", {}) if isinstance(call, Mapping) else {}
        said = {"name": function.get("name"), "arguments": function.get("arguments")}
        texts.append(f"{BEGIN}\n{json.dumps(said, ensure_ascii=False)}\n{END}")
    return {"role": message["role"], "content": "\n".join(texts)}
