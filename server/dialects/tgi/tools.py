"""TGI's tools: an object that a grammar forces, ``{"function": {"_name": ..., <arguments>}}``.

A model that may also answer in text has one more tool, ``no_tool``; when it takes that, the chat is
run once more without tools. (TGI's router/src/infer/tool_grammar.rs.)

Where this differs from TGI on purpose: the object can't be empty, references inside a tool's
schema work, and the counts of an answer in text are those of the run that gave it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmi_server.dialects.tgi.errors import TgiError

NO_TOOL = "no_tool"
_NO_TOOL = {
    "type": "function",
    "function": {
        "name": NO_TOOL,
        "description": "Open ended response with no specific tool selected",
        "parameters": {"type": "object", "properties": {}},
    },
}
_PROMPT = (
    "\nGiven the functions available, please respond with a JSON for a function call with its "
    "proper arguments that best answers the given prompt. Respond in the format {name: function "
    "name, parameters: dictionary of argument name and its value}.Do not use variables.\n"
)
_CALLED = re.compile(r'\s*\{\s*"function"\s*:\s*\{\s*"_name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,?\s*')
_DEFINITIONS = ("$defs", "definitions")


@dataclass(frozen=True, slots=True)
class TgiTools:
    """The tools in play: of a call that must come, or may (``is_free``)."""

    definitions: tuple[Mapping[str, Any], ...]
    prompt: str
    is_free: bool

    @property
    def grammar(self) -> dict[str, Any]:
        """In TGI's form."""
        functions = [tool["function"] for tool in self.definitions]
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {"function": {"anyOf": [_call_schema(f) for f in functions]}},
            "required": ["function"],
            "additionalProperties": False,
        }
        for name in _DEFINITIONS:
            shared = {k: v for f in functions for k, v in _parameters(f).get(name, {}).items()}
            if shared:
                schema[name] = shared
        return {"type": "json", "value": schema}

    def described(self) -> list[dict[str, Any]]:
        """As templates and prompts get them: schemas are texts."""
        return [
            {
                "type": "function",
                "function": {
                    "description": function.get("description"),
                    "name": function["name"],
                    "arguments": json.dumps(_parameters(function), separators=(",", ":")),
                },
            }
            for function in (tool["function"] for tool in self.definitions)
        ]

    def suffix(self, *, in_template: bool) -> str:
        """What is added to the last message, whether or not the template shows the tools."""
        if in_template:
            return f"\n---\n{self.prompt}"
        described = json.dumps(self.described(), ensure_ascii=False, separators=(",", ":"))
        return f"\n---\n{described}\n{self.prompt}"


def tgi_tools(
    definitions: list[Any] | None, choice: Any, prompt: str | None, *, has_grammar: bool
) -> TgiTools | None:
    """The tools of a chat, None if none may be called; TgiError for what TGI refuses."""
    if definitions is not None and has_grammar and choice != "none":
        raise _error("Grammar and tools are mutually exclusive")  # TGI says so of no tools, too
    if not definitions or choice == "none":
        return None
    for definition in definitions:
        _check(definition)
    tools = tuple(definitions)
    is_free = choice is None or choice == "auto"
    if is_free:
        tools = (*tools, _NO_TOOL)
    elif choice != "required":
        name = _name_of(choice)
        tools = tuple(tool for tool in tools if tool["function"]["name"] == name)
        if not tools:
            raise _error(f"Tool with name {name} not found")
    return TgiTools(tools, prompt or _PROMPT, is_free)


def called_name(text: str) -> str | None:
    """The tool that an object calls, once as much of it is there."""
    match = _CALLED.match(text)
    return None if match is None else str(json.loads(match[1]))


def arguments_of(text: str) -> str:
    """The arguments of a complete object, as JSON."""
    match = _CALLED.match(text)
    try:
        call = json.loads(text)["function"]
    except (ValueError, KeyError, TypeError):
        call = None
    if match is None or not isinstance(call, dict):
        raise _error(f"Failed to parse the tool call: {text[:200]!r} is cut short")
    return json.dumps(
        {name: value for name, value in call.items() if name != "_name"},
        ensure_ascii=False,
        separators=(",", ":"),
    )


class ArgumentStream:
    """The arguments of a call, piece by piece: what follows the name, but for the last brace."""

    def __init__(self) -> None:
        self._held = ""
        self._has_name = False

    def push(self, text: str) -> tuple[str | None, str]:
        """The tool's name when it becomes known, and what is new of its arguments."""
        self._held += text
        name = None
        begin = ""
        if not self._has_name:
            match = _CALLED.match(self._held)
            # What follows the name must be there, or a comma could still come.
            if match is None or match.end() == len(self._held):
                return None, ""
            self._has_name = True
            name, begin = str(json.loads(match[1])), "{"
            self._held = self._held[match.end() :]
        shown = self._held.rstrip("} \n")
        self._held = self._held[len(shown) :]
        return name, begin + shown

    def flush(self) -> str:
        """The end of the arguments."""
        held, self._held = self._held.rstrip(), ""
        return held.removesuffix("}") if self._has_name else ""


def _call_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    parameters = _parameters(function)
    required = parameters.get("required", [])
    return {
        "type": "object",
        "properties": {
            "_name": {"type": "string", "const": function["name"]},
            **parameters.get("properties", {}),
        },
        "required": ["_name", *(required if isinstance(required, list) else [])],
        "additionalProperties": parameters.get("additionalProperties") in (True, "true"),
    }


def _parameters(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """TGI's clients also call them arguments."""
    parameters = function.get("parameters", function.get("arguments"))
    return parameters if isinstance(parameters, Mapping) else {}


def _name_of(choice: Any) -> str:
    if isinstance(choice, Mapping):
        function = choice.get("function")
        choice = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(choice, str):
        raise _error("tool_choice must be auto, none, required or a function")
    return choice


def _check(definition: Any) -> None:
    function = definition.get("function") if isinstance(definition, Mapping) else None
    if not (isinstance(function, Mapping) and isinstance(function.get("name"), str)):
        raise _error("every tool needs a function with a name")
    properties = _parameters(function).get("properties", {})
    if not isinstance(properties, Mapping) or any(
        not isinstance(_parameters(function).get(name, {}), Mapping) for name in _DEFINITIONS
    ):
        raise _error(f"the parameters of {function['name'][:80]} are no schema of an object")


def _error(message: str) -> TgiError:
    return TgiError(f"Tool error: {message}", "tool_error")
