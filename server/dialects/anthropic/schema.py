"""The bodies of Anthropic's messages, and the chats that they are.

Field names are those of the Messages API (version 2023-06-01). What changes nothing here is taken
and ignored: metadata, service_tier, cache_control (prefixes are cached anyway), the signatures of
thinking. Its budget_tokens are enforced where the model is known to think.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from lmi_core.engine.sampling_params import check_texts
from lmi_core.errors import UserError
from lmi_server.dialects.decode import Messages, decode_json
from lmi_server.dialects.openai.chat_schema import ChatBody, thinking_variables
from lmi_server.dialects.openai.schema import check_range
from lmi_server.dialects.unknown_fields import Kinds, shape

_TEXT_ONLY = "only text is available"


_TEXT = shape("type", "text", "cache_control", "citations")
_FORMAT = shape("type", "schema")
_BLOCKS = Kinds(
    {
        "text": _TEXT,
        "thinking": shape("type", "thinking", "signature"),
        "redacted_thinking": shape("type", "data"),
        "tool_use": shape("type", "id", "name", "input", "cache_control"),
        "tool_result": shape("type", "tool_use_id", "is_error", "cache_control", content=_TEXT),
    }
)
WITHIN = shape(
    messages=shape("role", content=_BLOCKS),
    system=_TEXT,
    thinking=shape("type", "budget_tokens", "display"),
    output_config=shape("effort", format=_FORMAT),
    output_format=_FORMAT,
    tool_choice=shape("type", "name", "disable_parallel_tool_use"),
    tools=shape("type", "name", "description", "input_schema", "strict", "cache_control"),
    metadata=shape("user_id"),
)
"""What the objects in a body may have."""


class CountBody(msgspec.Struct, frozen=True, kw_only=True):
    """What makes a prompt: the body of ``count_tokens``."""

    model: str | None = None
    messages: Messages
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    """As betas of the API had it, beside ``output_config``."""


class MessagesBody(CountBody, frozen=True, kw_only=True):
    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    max_queue_s: float | None = None
    """As on OpenAI's routes: the API has no such field."""


_MESSAGES = msgspec.json.Decoder(MessagesBody)
_COUNT = msgspec.json.Decoder(CountBody)


def decode_messages(body: bytes) -> MessagesBody:
    """UserError names the field at fault."""
    message = decode_json(_MESSAGES, body)
    check_range("max_tokens", message.max_tokens, 1, None)
    check_range("temperature", message.temperature, 0.0, 1.0)
    check_range("top_p", message.top_p, 0.0, 1.0)
    check_range("top_k", message.top_k, 0, None)
    check_range("max_queue_s", message.max_queue_s, 0, None)
    budget = (message.thinking or {}).get("budget_tokens")
    if isinstance(budget, int) and budget >= message.max_tokens:
        raise UserError(
            f"max_tokens must be more than thinking.budget_tokens ({budget}), got "
            f"{message.max_tokens}",
            field="max_tokens",
        )
    check_texts("stop_sequences", tuple(message.stop_sequences or ()))
    if any(not text for text in message.stop_sequences or ()):
        raise UserError("stop_sequences must not hold an empty text", field="stop_sequences")
    return message


def decode_count(body: bytes) -> CountBody:
    return decode_json(_COUNT, body)


def chat_of(body: CountBody) -> ChatBody:
    """The same request as a chat. UserError names the field at fault."""
    if not body.messages:
        raise UserError("messages is empty; send at least one message", field="messages")
    messages = _system(body.system)
    for index, message in enumerate(body.messages):
        messages += _chat_messages(f"messages[{index}]", message)
    goes_on = body.messages[-1].get("role") == "assistant"
    choice, is_parallel = _choice(body.tool_choice)
    fields: dict[str, Any] = {}
    if isinstance(body, MessagesBody):
        fields = {
            "max_tokens": body.max_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "stop": body.stop_sequences,
            "stream": body.stream,
            "max_queue_s": body.max_queue_s,
        }
    return ChatBody(
        model=body.model,
        messages=messages,
        tools=[_tool(f"tools[{index}]", tool) for index, tool in enumerate(body.tools or ())],
        tool_choice=choice,
        parallel_tool_calls=is_parallel,
        continue_final_message=goes_on,
        add_generation_prompt=not goes_on,
        response_format=_response_format(body),
        chat_template_kwargs={**_effort(body.output_config), **_thinking(body.thinking)},
        **fields,
    )


def _system(system: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    if not system:
        return []
    text = system if isinstance(system, str) else _texts("system", system)
    return [{"role": "system", "content": text}]


def _response_format(body: CountBody) -> dict[str, Any] | None:
    """The JSON schema of the answer, as chats have it."""
    field, form = "output_format", body.output_format
    if body.output_config is not None and body.output_config.get("format") is not None:
        field, form = "output_config.format", body.output_config["format"]
    if form is None:
        return None
    schema = form.get("schema") if isinstance(form, Mapping) else None
    if not isinstance(schema, Mapping) or form.get("type") != "json_schema":
        raise UserError(
            f'{field} must be {{"type": "json_schema", "schema": {{...}}}}', field=field
        )
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}


def _effort(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """``max``, which no template knows, is the most that they do."""
    effort = (config or {}).get("effort")
    return thinking_variables("high" if effort == "max" else effort, "output_config.effort")


def _thinking(thinking: Mapping[str, Any] | None) -> dict[str, Any]:
    """Templates know a switch by one of these names, and some the budget."""
    if thinking is None:
        return {}
    kind = thinking.get("type")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise UserError(
            f"thinking.type must be enabled, disabled or adaptive, got {str(kind)[:40]!r}",
            field="thinking.type",
        )
    is_on = kind != "disabled"
    switches: dict[str, Any] = {"enable_thinking": is_on, "thinking": is_on}
    budget = thinking.get("budget_tokens")
    if kind != "enabled" or budget is None:
        return switches
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < 1:
        raise UserError(
            f"thinking.budget_tokens must be at least 1, got {str(budget)[:40]}",
            field="thinking.budget_tokens",
        )
    return {**switches, "thinking_budget": budget}


def _choice(choice: Mapping[str, Any] | None) -> tuple[Any, bool]:
    if choice is None:
        return None, True
    is_parallel = not choice.get("disable_parallel_tool_use")
    match choice.get("type"):
        case "auto" | "none" as kind:
            return kind, is_parallel
        case "any":
            return "required", is_parallel
        case "tool" if isinstance(choice.get("name"), str):
            return {"type": "function", "function": {"name": choice["name"]}}, is_parallel
    raise UserError(
        'tool_choice must be {"type": "auto", "any" or "none"} or {"type": "tool", "name": ...}',
        field="tool_choice",
    )


def _tool(where: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    kind = tool.get("type", "custom")
    if kind not in ("custom", None):
        raise UserError(
            f"{where}.type is {str(kind)[:60]!r}; only the client's own tools are available",
            field=f"{where}.type",
        )
    schema = tool.get("input_schema")
    if not isinstance(tool.get("name"), str) or not isinstance(schema, Mapping):
        raise UserError(f"{where} needs a name and an input_schema", field=where)
    function = {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": schema,
        "strict": bool(tool.get("strict")),
    }
    return {"type": "function", "function": function}


def _chat_messages(where: str, message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A message may be several: the results of tools have one each."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise UserError(
            f"{where}.role must be user or assistant, got {str(role)[:40]!r}", field=f"{where}.role"
        )
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise UserError(
            f"{where}.content must be a text or a list of blocks", field=f"{where}.content"
        )
    return (_assistant if role == "assistant" else _user)(f"{where}.content", content)


def _user(where: str, blocks: list[Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    texts: list[str] = []
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        if _kind(place, block) == "tool_result":
            messages.append(_result(place, block))
        else:
            texts.append(_text(place, block))
    if texts:
        messages.append({"role": "user", "content": "\n".join(texts)})
    return messages


def _result(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(block.get("tool_use_id"), str):
        raise UserError(f"{where} needs a tool_use_id", field=f"{where}.tool_use_id")
    content = block.get("content") or ""
    text = content if isinstance(content, str) else _texts(f"{where}.content", content)
    if block.get("is_error"):
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": text}


def _assistant(where: str, blocks: list[Any]) -> list[dict[str, Any]]:
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    message: dict[str, Any] = {"role": "assistant"}
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        match _kind(place, block):
            case "tool_use":
                calls.append(_call(place, block))
            case "thinking":
                message["reasoning_content"] = str(block.get("thinking") or "")
            case "redacted_thinking":
                pass
            case _:
                texts.append(_text(place, block))
    message["content"] = "\n".join(texts)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _call(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    name, given = block.get("name"), block.get("input", {})
    if not isinstance(name, str) or not isinstance(given, Mapping):
        raise UserError(f"{where} needs a name and an input object", field=where)
    function = {"name": name, "arguments": json.dumps(given, ensure_ascii=False)}
    return {"id": str(block.get("id") or ""), "type": "function", "function": function}


def _texts(where: str, blocks: Any) -> str:
    if not isinstance(blocks, list):
        raise UserError(f"{where} must be a text or a list of blocks", field=where)
    return "\n".join(_text(f"{where}[{i}]", block) for i, block in enumerate(blocks))


def _text(where: str, block: Any) -> str:
    if _kind(where, block) == "text" and isinstance(block.get("text"), str):
        return str(block["text"])
    raise UserError(f"{where} is {block.get('type')!r}; {_TEXT_ONLY}", field=where)


def _kind(where: str, block: Any) -> str:
    if isinstance(block, Mapping) and isinstance(block.get("type"), str):
        return str(block["type"])
    raise UserError(f"{where} must be a block with a type", field=where)
