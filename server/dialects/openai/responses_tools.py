"""Tools of OpenAI's responses as tools of chats: functions, and custom ones, which take a text.

A custom tool is a function with one argument, ``input``. A regex is the pattern of that text. A
Lark grammar has no place within JSON: it is enforced where ``tool_choice`` names its tool, whose
input is then all that the model writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmi_core.errors import UserError

_FORMATS = '{"type": "text"} or {"type": "grammar", "syntax": "lark" or "regex", "definition": ...}'
_UNITS = re.compile(
    r'(?:[^"\\]|\\[^u]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
    r"|\\u(?![dD][89abAB])[0-9a-fA-F]{4})+",
    re.DOTALL,
)
_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')


@dataclass(frozen=True, slots=True)
class CustomTools:
    """The formats of custom tools by their names."""

    formats: Mapping[str, Mapping[str, Any]]
    sole: str | None = None
    """The tool whose input the whole answer is."""

    def choice(self, given: str | Mapping[str, Any] | None) -> tuple[Any, str | None]:
        """``tool_choice`` as chats write it, and the tool that it names if that has a Lark grammar.
        UserError for a Lark grammar that can't be enforced, or a choice of no known form."""
        named = None
        if isinstance(given, Mapping) and given.get("type") in ("function", "custom"):
            named = given.get("name")
        if given != "none":
            for name in self.formats:
                if self._is_lark(name) and name != named:
                    raise UserError(
                        f"the tool {name!r} has a Lark grammar, which is enforced only where "
                        "tool_choice names the tool; name it, or send a regex or the format text",
                        field="tools",
                    )
        if isinstance(named, str) and self._is_lark(named):
            return None, named
        return _chat_choice(given), None

    def grammar_text(self, name: str) -> str:
        return str(self.formats[name]["definition"])

    def told(self, name: str) -> str:
        """What the model is told that writes a tool's input and nothing else."""
        description = self.formats[name].get("description") or ""
        return f"Write the input of the tool {name}, and nothing else. {description}".strip()

    def _is_lark(self, name: str) -> bool:
        return name in self.formats and self.formats[name].get("syntax") == "lark"


def custom_tools(tools: list[dict[str, Any]]) -> CustomTools:
    """UserError names the tool at fault."""
    formats: dict[str, Mapping[str, Any]] = {}
    for index, tool in enumerate(tools):
        if tool.get("type") == "custom":
            name = _name(f"tools[{index}]", tool)
            given = _format(f"tools[{index}].format", tool)
            formats[name] = {**given, "description": tool.get("description")}
    return CustomTools(formats)


def tool_of(where: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as chats write it; UserError for those that aren't the client's own."""
    kind = tool.get("type")
    if kind not in ("function", "custom"):
        raise UserError(
            f"{where}.type is {str(kind)[:60]!r}; only the client's own tools are available: "
            "function and custom",
            field=f"{where}.type",
        )
    function: dict[str, Any] = {"name": _name(where, tool)}
    if tool.get("description"):
        function["description"] = tool["description"]
    if kind == "function":
        function |= {name: tool[name] for name in ("parameters", "strict") if tool.get(name)}
        return {"type": "function", "function": function}
    given = _format(f"{where}.format", tool)
    text: dict[str, Any] = {"type": "string"}
    if given.get("syntax") == "regex":
        text["pattern"] = f"^(?:{given['definition']})$"
        function["strict"] = True
    function["parameters"] = {
        "type": "object",
        "properties": {"input": text},
        "required": ["input"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": function}


def as_arguments(text: str) -> str:
    """A custom tool's input as a function's arguments."""
    return json.dumps({"input": text}, ensure_ascii=False)


class InputReader:
    """The text in the arguments of a custom tool, while they come."""

    def __init__(self) -> None:
        self._held = ""
        self._has_begun = False

    def push(self, arguments: str) -> str:
        """The text that is new."""
        self._held += arguments
        if not self._has_begun:
            begin = _BEGIN.match(self._held)
            if begin is None:
                return ""
            self._has_begun = True
            self._held = self._held[begin.end() :]
        units = _UNITS.match(self._held)
        if units is None:
            return ""
        self._held = self._held[units.end() :]
        return str(json.loads(f'"{units[0]}"', strict=False))

    def flush(self) -> str:
        """What a model wrote that gave its argument another name: all of it."""
        return "" if self._has_begun else self._held


def _chat_choice(given: str | Mapping[str, Any] | None) -> Any:
    if not isinstance(given, Mapping):
        return given
    match given.get("type"):
        case "function" | "custom":
            return _named(given)
        case "allowed_tools" if isinstance(given.get("tools"), list):
            tools = [_named(tool) for tool in given["tools"]]
            allowed = {"mode": given.get("mode", "auto"), "tools": tools}
            return {"type": "allowed_tools", "allowed_tools": allowed}
    raise UserError(
        'tool_choice must be auto, none, required, {"type": "function" or "custom", "name": ...} '
        'or {"type": "allowed_tools", "mode": ..., "tools": [...]}',
        field="tool_choice",
    )


def _named(choice: Any) -> dict[str, Any]:
    name = choice.get("name") if isinstance(choice, Mapping) else None
    return {"type": "function", "function": {"name": name}}


def _name(where: str, tool: Mapping[str, Any]) -> str:
    if not isinstance(tool.get("name"), str):
        raise UserError(f"{where} needs a name", field=where)
    return str(tool["name"])


def _format(where: str, tool: Mapping[str, Any]) -> Mapping[str, Any]:
    given = tool.get("format") or {"type": "text"}
    if isinstance(given, Mapping):
        if given.get("type") == "text":
            return given
        is_known = given.get("type") == "grammar" and given.get("syntax") in ("lark", "regex")
        if is_known and isinstance(given.get("definition"), str):
            return given
    raise UserError(f"{where} must be {_FORMATS}", field=where)
