"""The request schema of chat completions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import UserError
from lmi_core.structured.grammar import GrammarKind
from lmi_core.structured.thinking_budget import ThinkingBudget
from lmi_core.text.chat import ChatTemplate
from lmi_core.tools.forms import HERMES, ToolForm
from lmi_server.dialects.decode import Messages, decode_json
from lmi_server.dialects.grammar_fields import requested_grammar
from lmi_server.dialects.openai.chat_tools import (
    AnswerForm,
    ChatTools,
    answer_form,
    chat_tools,
    render_with_tools,
)
from lmi_server.dialects.openai.schema import (
    OpenAIBody,
    check_common,
    check_range,
    common_sampling_params,
    unavailable,
)

_TOP_LOGPROBS_MAX = 20
_BESIDE_TOOLS = (GrammarKind.JSON_SCHEMA, GrammarKind.CHOICE)
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


class ChatBody(OpenAIBody, frozen=True, kw_only=True):
    """A chat completion request; what isn't named here is ignored."""

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None
    reasoning_effort: str | None = None


_BODY = msgspec.json.Decoder(ChatBody)


def decode_chat(body: bytes) -> ChatBody:
    """Decode and check; UserError names the field at fault."""
    chat = decode_json(_BODY, body)
    if not chat.messages:
        raise UserError("messages is empty; send at least one message", field="messages")
    check_common(chat)
    if chat.num_candidates != chat.num_choices:
        raise UserError(
            f"best_of is {chat.best_of} and n is {chat.num_choices}; only completions choose the "
            "best of several: leave best_of out",
            field="best_of",
        )
    check_range("max_completion_tokens", chat.max_completion_tokens, 0, None)
    check_range("thinking_token_budget", chat.thinking_token_budget, 0, None)
    check_range("top_logprobs", chat.top_logprobs, -1, _TOP_LOGPROBS_MAX)
    if chat.functions:
        raise unavailable("functions")
    for name in ("audio", "web_search_options", "chat_template"):
        if getattr(chat, name):
            raise unavailable(name)
    if chat.modalities not in (None, [], ["text"]):
        raise UserError(
            "modalities other than text are not available in this version", field="modalities"
        )
    if chat.continue_final_message and chat.add_generation_prompt:
        raise UserError(
            "continue_final_message and add_generation_prompt exclude each other; send one",
            field="continue_final_message",
        )
    return chat


def template_arguments(chat: ChatBody) -> dict[str, Any]:
    """What the chat template gets besides the messages."""
    variables = {
        name: value
        for name, value in (chat.chat_template_kwargs or {}).items()
        if name.isidentifier()
    }
    for reserved in ("messages", "tools", "documents", "self"):
        variables.pop(reserved, None)
    return {
        **thinking_variables(chat.reasoning_effort, "reasoning_effort"),
        **variables,
        "add_generation_prompt": chat.add_generation_prompt is not False,
        "continue_final_message": bool(chat.continue_final_message),
        "documents": chat.documents,
    }


def thinking_variables(effort: object, field: str) -> dict[str, Any]:
    """What chat templates know of it: the effort, or a switch by one of two names."""
    if effort is None:
        return {}
    if effort not in _EFFORTS:
        raise UserError(
            f"{field} must be {', '.join(_EFFORTS)}, got {str(effort)[:40]!r}", field=field
        )
    if effort == "none":
        return {"enable_thinking": False, "thinking": False}
    return {"reasoning_effort": effort}


def plain_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose contents are strings, as most templates expect; text parts are joined."""
    return [_plain_message(index, message) for index, message in enumerate(messages)]


def tools_of(chat: ChatBody, template: ChatTemplate | None) -> ChatTools | None:
    """The tools that the chat's model may call; UserError names the field at fault."""
    tools = chat_tools(
        chat.tools,
        chat.tool_choice,
        form=HERMES if template is None else _form(chat, template),
        is_parallel=chat.parallel_tool_calls is not False,
    )
    if tools is not None and not (template is None or template.auto_tools or tools.forced):
        raise UserError(
            '"auto" tool choice requires --enable-auto-tool-choice to be set, which is off here; '
            "send tool_choice required, none or a tool's name",
            field="tool_choice",
        )
    asked = None if tools is None or tools.forced else requested_grammar(chat)
    if asked is not None and asked.kind not in _BESIDE_TOOLS:
        raise UserError(
            "beside tools that may be called an answer can have a JSON schema (json_schema, "
            "json_object) or be one of some choices; texts of a regex, a grammar or a structural "
            "tag may begin as calls do: leave one of them out, or send tool_choice: none, required "
            "or a tool's name",
            field=asked.field,
        )
    return tools


def echoed_text(chat: ChatBody) -> str:
    """With ``echo``, the text of the last message if the answer goes on with it: as vLLM has it,
    where both are the assistant's."""
    if not chat.echo:
        return ""
    last = _plain_message(len(chat.messages) - 1, chat.messages[-1])
    goes_on = chat.add_generation_prompt is False or last["role"] == "assistant"
    return str(last["content"]) if goes_on else ""


def chat_prompt(chat: ChatBody, template: ChatTemplate) -> str:
    """The prompt that the messages and tools make."""
    return render_with_tools(
        template, plain_messages(chat.messages), tools_of(chat, template), template_arguments(chat)
    )


def chat_request(
    request_id: str, chat: ChatBody, prompt: str, params: SamplingParams, adapter: str
) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt=prompt,
        add_special_tokens=bool(chat.add_special_tokens),
        params=params,
        priority=chat.priority or 0,
        max_queue_s=chat.max_queue_s,
        cache_salt=chat.cache_salt or "",
        echo=chat.shows_prompt,
        adapter=adapter,
    )


def _form(chat: ChatBody, template: ChatTemplate) -> ToolForm:
    """The template's, unless its model has to be told of tools in words, which are Hermes's."""
    return template.tool_form if template.takes_tools or not chat.tools else template.told_form


def form_of(
    chat: ChatBody, template: ChatTemplate, tools: ChatTools | None, prompt: str
) -> AnswerForm | None:
    """How the answer to the prompt that the chat made is taken apart."""
    return answer_form(
        tools,
        template,
        prompt,
        has_grammar=requested_grammar(chat) is not None,
        shows_reasoning=chat.include_reasoning is not False,
    )


def chat_sampling_params(chat: ChatBody, form: AnswerForm | None = None) -> SamplingParams:
    """Without a limit, as many tokens as fit; UserError for one of 0."""
    name = "max_tokens" if chat.max_completion_tokens is None else "max_completion_tokens"
    limit: int | None = getattr(chat, name)
    if limit == 0:
        raise UserError(f"{name} must be at least 1, got 0", field=name)
    params = common_sampling_params(
        chat,
        max_new_tokens=limit,
        logprobs=(chat.top_logprobs or 0) if chat.logprobs else None,
    )
    thinking = _thinking_budget(chat, form)
    if form is None:
        return params
    return replace(
        params,
        grammar=form.grammar(params.grammar),
        kept_special_tokens=form.marks,
        thinking=thinking,
    )


def _thinking_budget(chat: ChatBody, form: AnswerForm | None) -> ThinkingBudget | None:
    """The request's own, or what it tells the template, which no model is refused for."""
    budget = chat.thinking_token_budget
    hint = (chat.chat_template_kwargs or {}).get("thinking_budget")
    is_hint = budget is None
    if is_hint and isinstance(hint, int) and not isinstance(hint, bool) and hint >= 0:
        budget = hint
    if budget is None:
        return None
    reasoning = None if form is None else form.reasoning
    if form is None or reasoning is None:
        if is_hint or requested_grammar(chat) is not None:
            return None
        raise UserError(
            "thinking_token_budget needs a model that is known to think: its chat template shows "
            "no marks of reasoning; name them by option.reasoning_parser, or leave it out",
            field="thinking_token_budget",
        )
    return ThinkingBudget(
        num_tokens=budget,
        begin=reasoning.begin,
        end=reasoning.end,
        is_open=form.is_open,
        is_hint=is_hint,
    )


def _plain_message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    where = f"messages[{index}]"
    calls = message.get("tool_calls")
    if not isinstance(message.get("role"), str) or not ("content" in message or calls):
        raise UserError(f"{where} needs a role and a content", field=where)
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(_text_of(f"{where}.content[{i}]", p) for i, p in enumerate(content))
    elif content is not None and not isinstance(content, str):
        raise UserError(
            f"{where}.content must be a string or a list of parts, got {type(content).__name__}",
            field=f"{where}.content",
        )
    plain = {**message, "content": content or ""}
    if calls is not None:
        if not isinstance(calls, list):
            raise UserError(f"{where}.tool_calls must be a list", field=f"{where}.tool_calls")
        plain["tool_calls"] = [
            _plain_call(f"{where}.tool_calls[{number}]", call) for number, call in enumerate(calls)
        ]
    return plain


def _plain_call(where: str, call: Any) -> Any:
    """Arguments come as JSON text, but templates expect the object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(
            f'{where} must be {{"id": ..., "type": "function", "function": {{"name": ..., '
            '"arguments": ...}}',
            field=where,
        )
    if not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _text_of(where: str, part: object) -> str:
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise UserError(f"{where} is {kind!r}; only text parts are available", field=where)
