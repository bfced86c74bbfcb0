"""Tools that a model may call: what it is told of them, and the grammar of calls it must make."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lmi_core.errors import UserError
from lmi_core.structured.grammar import MAX_GRAMMAR_CHARS, Grammar
from lmi_core.structured.marks import quote_mark, text_before_mark
from lmi_core.structured.schema_notes import without_notes
from lmi_core.tools.calls import BEGIN, END
from lmi_core.tools.forms import HERMES, LLAMA, ToolForm

JSON_OPTIONS = {"x-guidance": {"whitespace_pattern": "[ ]?"}}
"""Of the library, in a schema that is part of a grammar."""
_NO_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


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


def call_grammar(
    tools: Sequence[Tool],
    form: ToolForm,
    *,
    is_parallel: bool,
) -> Grammar:
    """Text that is one call of a tool with valid arguments; with ``is_parallel``, or several where
    the form has several."""
    written = form.written
    one = " | ".join(f"call_{number}" for number in range(len(tools)))
    calls = "call"
    if is_parallel and written.between is not None:
        calls = f"call ({quote_mark(written.between)} call)*"
    whole = f"{quote_mark(written.begin)} {calls} {quote_mark(written.end)}"
    head = [f"start: {whole}", f"call: {one}"]
    return fitted(lambda held: [*head, *_call_rules(held, form)], tools)


def free_grammar(tools: Sequence[Tool], form: ToolForm, *, is_parallel: bool) -> Grammar:
    """Any text, in which every call of a ``strict`` tool has valid arguments.

    The other tools' arguments are any JSON object. In Llama 3's style a text that begins with a
    brace is a call, too. UserError for forms whose calls can't be told from text as they begin.
    """
    held = [tool if tool.strict else loose(tool) for tool in tools]
    if form in (HERMES, LLAMA):
        return _free_tagged_grammar(held, form, is_parallel=is_parallel)
    if not form.opening:
        raise UserError(
            f"strict tools need tool_choice required with the parser {form.name}, whose calls "
            "aren't written as JSON; leave strict out",
            field="tools",
        )
    written = form.written
    first = " | ".join(f"first_{number}" for number in range(len(tools)))
    more = " | ".join(f"call_{number}" for number in range(len(tools)))
    calls = f"({first})"
    if is_parallel and written.between is not None:
        calls += f" ({quote_mark(written.between)} ({more}))*"
    head = [
        f"start: opening {calls} {quote_mark(written.end)} BLANKS? | TEXT?",
        f"opening: {text_before_mark(form.opening)}",
        r"TEXT: /(.|\n)*/",
        r"BLANKS: /\s+/",
    ]
    return fitted(lambda held: [*head, *_first_rules(held, form), *_call_rules(held, form)], held)


def _free_tagged_grammar(tools: Sequence[Tool], form: ToolForm, *, is_parallel: bool) -> Grammar:
    """For the two forms that are read side by side."""
    key = "arguments" if form is HERMES else "parameters"
    call = " | ".join(f"call_{number}" for number in range(len(tools)))
    tagged = f'before ({call}) "\\n"? {json.dumps(END)}'
    # A lazy match ends with the first tag: where a call may come, no text can have one in it.
    free = "tagged* TEXT?" if is_parallel else "tagged | TEXT?"
    text = r"(.|\n)*"
    if form is LLAMA:
        free, text = f"{call} | {free}", r"\s*([^{\s](.|\n)*)?"
    head = [f"start: {free}", f"tagged: {tagged}", 'before: opening "\\n"?']
    head += [f"opening[lazy]: /{text}{BEGIN}/", f"TEXT: /{text}/"]

    def rules(held: Sequence[Tool]) -> list[str]:
        return [
            f'call_{number}: {json.dumps(_object_head(tool, key))} {_schema(tool)} "}}"'
            for number, tool in enumerate(held)
        ]

    return fitted(lambda held: [*head, *rules(held)], tools)


def fitted(lines: Callable[[Sequence[Tool]], list[str]], tools: Sequence[Tool]) -> Grammar:
    """The grammar of tools, without what describes their arguments if it would be too long with
    it."""
    text = "\n".join(lines(tools))
    if len(text) > MAX_GRAMMAR_CHARS:
        text = "\n".join(lines([_bare(tool) for tool in tools]))
    if len(text) > MAX_GRAMMAR_CHARS:
        raise UserError(
            f"the schemas of {len(tools)} tools have {len(text)} characters without their "
            f"descriptions; at most {MAX_GRAMMAR_CHARS} can be enforced: allow fewer tools "
            "(tool_choice allowed_tools, or a name), or send tool_choice auto without strict",
            field="tools",
        )
    return Grammar.lark(text, field="tools")


def _bare(tool: Tool) -> Tool:
    return replace(tool, parameters=without_notes(tool.parameters))


def _object_head(tool: Tool, key: str) -> str:
    return f'{{"name": {json.dumps(tool.name)}, "{key}": '


def _parts(tools: Sequence[Tool], form: ToolForm) -> list[tuple[str, str]]:
    """Of each tool's calls what comes before the arguments, and a rule of what follows."""
    written = form.written
    return [
        (
            written.head_of(tool.name),
            f"{_schema(tool)} {quote_mark(written.tail)}",
        )
        for tool in tools
    ]


def _first_rules(tools: Sequence[Tool], form: ToolForm) -> list[str]:
    """Of a text's first call, whose opening has come."""
    begin = form.written.begin
    return [
        f"first_{number}: {quote_mark((begin + head)[len(form.opening) :])} {rest}"
        for number, (head, rest) in enumerate(_parts(tools, form))
    ]


def _call_rules(tools: Sequence[Tool], form: ToolForm) -> list[str]:
    return [
        f"call_{number}: {quote_mark(head)} {rest}"
        for number, (head, rest) in enumerate(_parts(tools, form))
    ]


def _schema(tool: Tool) -> str:
    schema = {**JSON_OPTIONS, **tool.parameters}
    return f"%json {json.dumps(schema)}"


def loose(tool: Tool) -> Tool:
    """The tool with any object for its arguments."""
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
