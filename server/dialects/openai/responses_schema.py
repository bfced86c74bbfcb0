"""The body of OpenAI's responses, and the chat that it is.

Field names are those of the Responses API. What changes nothing here is taken and ignored: labels,
``include`` but for what isn't there, ``max_tool_calls`` (of tools that OpenAI runs itself),
``text.verbosity``, ``reasoning.summary``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from lmi_core.errors import UserError
from lmi_server.dialects.decode import Messages, decode_json
from lmi_server.dialects.openai.chat_schema import ChatBody, thinking_variables
from lmi_server.dialects.openai.responses_input import messages_of
from lmi_server.dialects.openai.responses_tools import CustomTools, custom_tools, tool_of
from lmi_server.dialects.openai.schema import check_range
from lmi_server.dialects.unknown_fields import Kinds, shape

_REFUSED = ("background", "conversation", "prompt", "top_logprobs", "context_management")
_INCLUDED = "reasoning.encrypted_content"


_PARTS = Kinds(
    {
        **dict.fromkeys(
            ("input_text", "text", "summary_text", "reasoning_text"), shape("type", "text")
        ),
        "output_text": shape("type", "text", "annotations", "logprobs"),
        "refusal": shape("type", "refusal"),
    }
)
_ITEM = ("type", "id", "status")
_CALL = (*_ITEM, "call_id", "name")
_RESULT = shape(*_ITEM, "call_id", output=_PARTS)
_ITEMS = Kinds(
    {
        "message": shape(*_ITEM, "role", content=_PARTS),
        "reasoning": shape(*_ITEM, "encrypted_content", content=_PARTS, summary=_PARTS),
        "function_call": shape(*_CALL, "arguments"),
        "custom_tool_call": shape(*_CALL, "input"),
        "function_call_output": _RESULT,
        "custom_tool_call_output": _RESULT,
    },
    usual="message",
)
_TOOL = ("type", "name", "description")
_TOOLS = Kinds(
    {
        "function": shape(*_TOOL, "parameters", "strict"),
        "custom": shape(*_TOOL, format=shape("type", "syntax", "definition")),
    }
)
WITHIN = shape(
    input=_ITEMS,
    tools=_TOOLS,
    stream_options=shape("include_obfuscation"),
    reasoning=shape("effort", "summary", "generate_summary"),
    text=shape(
        "verbosity",
        format=shape(
            "type", "name", "description", "schema", "strict", "format", "structures", "triggers"
        ),
    ),
)
"""What the objects in a body may have."""


class ResponsesBody(msgspec.Struct, frozen=True, kw_only=True):
    """A request for a response; null counts as absent, what isn't named here is ignored."""

    model: str | None = None
    input: str | Messages
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    include: list[str] | None = None
    truncation: str | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None

    structured_outputs: dict[str, Any] | None = None
    """As open servers have it: what isn't among ``text``'s formats."""
    thinking_token_budget: int | None = None
    max_queue_s: float | None = None

    # Parsed so that they can be refused: their mechanism isn't there.
    background: bool | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    top_logprobs: int | None = None
    context_management: list[dict[str, Any]] | None = None


_BODY = msgspec.json.Decoder(ResponsesBody)


def decode_responses(body: bytes) -> ResponsesBody:
    """Decode and check; UserError names the field at fault."""
    asked = decode_json(_BODY, body)
    for name in _REFUSED:
        if getattr(asked, name):
            raise UserError(f"{name} is not available here; leave {name} out", field=name)
    for name in asked.include or ():
        if name != _INCLUDED:
            raise UserError(
                f"include has {name[:60]!r}; {_INCLUDED} alone is taken", field="include"
            )
    if asked.truncation not in (None, "disabled"):
        raise UserError(
            f"truncation must be disabled, got {asked.truncation[:40]!r}; leave items out instead",
            field="truncation",
        )
    check_range("max_output_tokens", asked.max_output_tokens, 1, None)
    check_range("temperature", asked.temperature, 0.0, 2.0)
    check_range("top_p", asked.top_p, 0.0, 1.0)
    check_range("max_queue_s", asked.max_queue_s, 0, None)
    return asked


def chat_of(
    asked: ResponsesBody, previous: list[dict[str, Any]]
) -> tuple[ChatBody, list[dict[str, Any]], CustomTools]:
    """The same request as a chat after the messages of a ``previous`` one; the messages that a next
    one goes on from, which have no instructions; and which tools aren't functions.

    UserError names the field at fault.
    """
    customs = custom_tools(asked.tools or [])
    tools = [tool_of(f"tools[{index}]", tool) for index, tool in enumerate(asked.tools or ())]
    response_format = _format(asked.text)
    messages = messages_of(asked.input, previous)
    choice, grammar = customs.choice(asked.tool_choice)
    told = [asked.instructions] if asked.instructions else []
    if grammar is not None:
        told.append(customs.told(grammar))
        customs = CustomTools(customs.formats, sole=grammar)
    chat = ChatBody(
        model=asked.model,
        messages=_with_system(told, messages),
        tools=None if grammar is not None else tools,
        tool_choice=choice,
        parallel_tool_calls=asked.parallel_tool_calls,
        max_tokens=asked.max_output_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        stream=asked.stream,
        # A tool that must be called leaves no place for an answer.
        response_format=None if grammar is not None else response_format,
        structured_outputs=None if grammar is not None else asked.structured_outputs,
        thinking_token_budget=asked.thinking_token_budget,
        max_queue_s=asked.max_queue_s,
        guided_grammar=None if grammar is None else customs.grammar_text(grammar),
        chat_template_kwargs=thinking_variables(
            (asked.reasoning or {}).get("effort"), "reasoning.effort"
        ),
    )
    return chat, messages, customs


def _with_system(told: list[str], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One system message at most comes first: many templates know no more."""
    count = 0
    while count < len(messages) and messages[count]["role"] == "system":
        told = [*told, messages[count]["content"]]
        count += 1
    system = [{"role": "system", "content": "\n\n".join(told)}] if told else []
    return [*system, *messages[count:]]


def _format(text: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """``text.format`` as chats write it."""
    given = (text or {}).get("format")
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind in ("text", "json_object"):
        return {"type": kind}
    if kind == "structural_tag":
        return dict(given)
    if kind != "json_schema" or not isinstance(given.get("schema"), Mapping):
        raise UserError(
            'text.format must be {"type": "text" or "json_object"}, {"type": "json_schema", '
            '"name": ..., "schema": {...}} or a structural_tag',
            field="text.format",
        )
    return {"type": kind, "json_schema": {"name": given.get("name"), "schema": given["schema"]}}
