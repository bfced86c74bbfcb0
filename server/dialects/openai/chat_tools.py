"""``tools`` and ``tool_choice`` of a chat: what the model is told, and how its calls are found.

With ``auto`` the model is free, and calls are looked for in its text; only the arguments of
``strict`` tools are held to their schema. ``required`` and a named tool are enforced by a grammar,
arguments included.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmi_core.errors import UserError
from lmi_core.structured.grammar import Grammar
from lmi_core.text.chat import ChatTemplate
from lmi_core.tools.calls import ToolCallParser
from lmi_core.tools.tools import (
    Tool,
    ToolStyle,
    call_grammar,
    calls_as_text,
    free_grammar,
    tool_of,
    with_instructions,
)

_MAX_TOOLS = 128
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_CHOICES = ("auto", "none", "required")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTools:
    """The tools that a chat's model may call."""

    tools: tuple[Tool, ...]
    style: ToolStyle
    grammar: Grammar | None
    """Of the calls that must be made, or of the text where a strict tool may be called."""

    def parser(self) -> ToolCallParser:
        """For one choice's text."""
        # Of a strict tool no call may come in a form that the grammar doesn't know.
        needs_tags = self.grammar is not None and self.style is ToolStyle.HERMES
        return ToolCallParser(frozenset(tool.name for tool in self.tools), needs_tags=needs_tags)


def chat_tools(
    definitions: list[Any] | None,
    choice: Any,
    *,
    style: ToolStyle,
    is_parallel: bool,
) -> ChatTools | None:
    """The tools in play; None when none may be called. UserError names the field at fault."""
    tools = _tools(definitions or [])
    chosen = _chosen(tools, choice)
    if not tools or choice == "none":
        return None
    grammar = None
    if choice not in (None, "auto"):
        grammar = call_grammar(chosen, style, is_parallel=is_parallel)
    elif any(tool.strict for tool in tools):
        grammar = free_grammar(tools, style, is_parallel=is_parallel)
    return ChatTools(tools=tools, style=style, grammar=grammar)


def render_with_tools(
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    tools: ChatTools | None,
    arguments: Mapping[str, Any],
) -> str:
    """The prompt; a template without a place for tools gets them as text."""
    offered = tools.tools if tools is not None else ()
    told: Sequence[Mapping[str, Any]] = messages
    if not template.takes_tool_calls:
        told = calls_as_text(told)
    if offered and not template.takes_tools:
        told, offered = with_instructions(told, offered), ()
    definitions = [tool.definition for tool in offered] or None
    return template.render(told, tools=definitions, **arguments)


def _tools(definitions: list[Any]) -> tuple[Tool, ...]:
    if len(definitions) > _MAX_TOOLS:
        raise UserError(
            f"tools has {len(definitions)} entries; at most {_MAX_TOOLS} are allowed", field="tools"
        )
    names: set[str] = set()
    for index, definition in enumerate(definitions):
        _check_tool(f"tools[{index}]", definition)
        name = definition["function"]["name"]
        if name in names:
            raise UserError(f"tools has {name!r} twice; names must differ", field="tools")
        names.add(name)
    return tuple(tool_of(definition) for definition in definitions)


def _check_tool(where: str, definition: Any) -> None:
    function = definition.get("function") if isinstance(definition, Mapping) else None
    if not (
        isinstance(function, Mapping)
        and isinstance(function.get("name"), str)
        and definition.get("type", "function") == "function"
    ):
        raise UserError(
            f'{where} must be {{"type": "function", "function": {{"name": ...}}}}', field=where
        )
    if not _NAME.fullmatch(function["name"]):
        raise UserError(
            f"{where}.function.name must be 1 to 64 letters, digits, dots, dashes or underscores, "
            f"got {function['name'][:80]!r}",
            field=where,
        )
    if not isinstance(function.get("strict"), bool | None):
        raise UserError(f"{where}.function.strict must be true or false", field=where)
    if not isinstance(function.get("parameters"), Mapping | None):
        raise UserError(f"{where}.function.parameters must be a JSON schema object", field=where)


def _chosen(tools: tuple[Tool, ...], choice: Any) -> tuple[Tool, ...]:
    """The tools that ``choice`` leaves."""
    if choice is None or choice in _CHOICES:
        if choice == "required" and not tools:
            raise UserError("tool_choice is required, but there are no tools", field="tool_choice")
        return tools
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise UserError(
            f'tool_choice must be {", ".join(_CHOICES)} or {{"type": "function", "function": '
            '{"name": ...}}',
            field="tool_choice",
        )
    chosen = tuple(tool for tool in tools if tool.name == name)
    if not chosen:
        known = ", ".join(tool.name for tool in tools) or "none"
        raise UserError(
            f"tool_choice names {name[:80]!r}, which is not among the tools ({known})",
            field="tool_choice",
        )
    return chosen
