"""``input`` of OpenAI's responses as the messages of a chat."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lmi_core.errors import UserError
from lmi_server.dialects.openai.responses_tools import as_arguments

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")


def messages_of(
    given: str | list[dict[str, Any]], previous: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The messages after ``previous``, with them; what an assistant said, thought and called in a
    row is one. UserError names the item at fault."""
    if not given:
        raise UserError("input is empty; send a text or at least one item", field="input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    messages = list(previous)
    calls = _names(messages)
    is_open = False
    """The last message is an assistant's that goes on."""
    for index, item in enumerate(items):
        where = f"input[{index}]"
        message = _message(where, item, calls)
        calls |= _names([message])
        joins = is_open and message["role"] == "assistant" and _fits(messages[-1], message)
        if joins:
            messages[-1] = _joined(messages[-1], message)
        else:
            messages.append(message)
        is_open = message["role"] == "assistant"
    return messages


def items_of(
    messages: list[dict[str, Any]], customs: frozenset[str], name: str
) -> list[dict[str, Any]]:
    """The items that messages are made of, with ids of ``name``: the same each time. ``customs``:
    the names of custom tools."""
    items: list[dict[str, Any]] = []
    calls = _names(messages)

    def add(prefix: str, kind: str, **fields: Any) -> None:
        item_id = f"{prefix}_{name}{len(items):04x}"
        items.append({"id": item_id, "type": kind, "status": "completed", **fields})

    for message in messages:
        role, text = message["role"], message["content"]
        if role == "tool":
            is_custom = calls.get(message["tool_call_id"]) in customs
            kind = "custom_tool_call_output" if is_custom else "function_call_output"
            add("fco", kind, call_id=message["tool_call_id"], output=text)
            continue
        if message.get("reasoning_content"):
            part = {"type": "reasoning_text", "text": message["reasoning_content"]}
            add("rs", "reasoning", summary=[], content=[part])
        if text or not (message.get("reasoning_content") or message.get("tool_calls")):
            part = {"type": "input_text", "text": text}
            if role == "assistant":
                part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
            add("msg", "message", role=role, content=[part])
        for call in message.get("tool_calls", ()):
            called = {"call_id": call["id"], "name": call["function"]["name"]}
            given = call["function"]["arguments"]
            if called["name"] in customs:
                add("ctc", "custom_tool_call", **called, input=_input_of(given))
            else:
                add("fc", "function_call", **called, arguments=given)
    return items


def _input_of(arguments: str) -> str:
    """Of a custom tool."""
    return str(json.loads(arguments).get("input", arguments))


def _message(where: str, item: Mapping[str, Any], calls: Mapping[str, str]) -> dict[str, Any]:
    match item.get("type", "message"):
        case "message":
            return _said(where, item)
        case "reasoning":
            thought = _texts(f"{where}.content", item.get("content") or item.get("summary") or "")
            return {"role": "assistant", "content": "", "reasoning_content": thought}
        case "function_call":
            return _called(where, item, _json(f"{where}.arguments", item.get("arguments")))
        case "custom_tool_call":
            if not isinstance(item.get("input"), str):
                raise UserError(f"{where}.input must be a text", field=f"{where}.input")
            return _called(where, item, as_arguments(item["input"]))
        case "function_call_output" | "custom_tool_call_output":
            return _result(where, item, calls)
        case kind:
            raise UserError(
                f"{where}.type is {str(kind)[:60]!r}; available are message, reasoning, "
                "function_call, function_call_output, custom_tool_call and "
                "custom_tool_call_output",
                field=f"{where}.type",
            )


def _said(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise UserError(
            f"{where}.role must be {', '.join(_ROLES)}, got {str(role)[:40]!r}",
            field=f"{where}.role",
        )
    return {"role": _ROLES[role], "content": _texts(f"{where}.content", item.get("content"))}


def _called(where: str, item: Mapping[str, Any], arguments: str) -> dict[str, Any]:
    name, call_id = item.get("name"), item.get("call_id")
    if not isinstance(name, str) or not isinstance(call_id, str):
        raise UserError(f"{where} needs a call_id and a name", field=where)
    function = {"name": name, "arguments": arguments}
    call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _result(where: str, item: Mapping[str, Any], calls: Mapping[str, str]) -> dict[str, Any]:
    call_id = item.get("call_id")
    if not isinstance(call_id, str) or call_id not in calls:
        raise UserError(
            f"{where}.call_id is {str(call_id)[:80]!r}, but no call before it has that id",
            field=f"{where}.call_id",
        )
    content = _texts(f"{where}.output", item.get("output"))
    return {"role": "tool", "tool_call_id": call_id, "name": calls[call_id], "content": content}


def _names(messages: list[dict[str, Any]]) -> dict[str, str]:
    """The tools that were called, by the ids of the calls."""
    calls = (call for message in messages for call in message.get("tool_calls", ()))
    return {call["id"]: call["function"]["name"] for call in calls}


def _fits(last: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
    """Whether what comes keeps its place when it joins: thought, text, calls."""
    if message.get("tool_calls"):
        return True
    if last.get("tool_calls") or last["content"]:
        return False
    return not message.get("reasoning_content")


def _joined(last: Mapping[str, Any], message: Mapping[str, Any]) -> dict[str, Any]:
    joined = {**last, "content": last["content"] or message["content"]}
    if message.get("tool_calls"):
        joined["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]
    return joined


def _texts(where: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UserError(f"{where} must be a text or a list of parts", field=where)
    return "\n".join(_text(f"{where}[{index}]", part) for index, part in enumerate(content))


def _text(where: str, part: object) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if isinstance(part, Mapping) and kind in _TEXTS:
        text = part.get("refusal" if kind == "refusal" else "text")
        if isinstance(text, str):
            return text
    raise UserError(f"{where} is {str(kind)[:60]!r}; only text is available", field=where)


def _json(where: str, arguments: object) -> str:
    try:
        if isinstance(arguments, str) and isinstance(
            json.loads(arguments or "{}", strict=False), dict
        ):
            return arguments or "{}"
    except (ValueError, RecursionError):
        pass
    raise UserError(
        f"{where} must be the JSON text of an object, got {str(arguments)[:60]!r}", field=where
    )
