"""Anthropic's messages as chats: how a call is parsed."""

from __future__ import annotations

from dataclasses import replace

from lmi_server.dialects.anthropic.output import Message, MessageEventsRenderer, MessageRenderer
from lmi_server.dialects.anthropic.schema import WITHIN, chat_of, decode_count, decode_messages
from lmi_server.dialects.base import Call, ParsedCall, Renderer
from lmi_server.dialects.openai.chat_schema import (
    chat_request,
    chat_sampling_params,
    form_of,
    tools_of,
)
from lmi_server.dialects.openai.openai import adapter_named, check_content_type, render_chat
from lmi_server.dialects.unknown_fields import log_ignored, report_fields, unknown_fields
from lmi_server.models.stand_in import DecodingModel


def parse_messages(model: DecodingModel, call: Call) -> ParsedCall:
    check_content_type(call.content_type)
    body = decode_messages(call.body)
    adapter = adapter_named(model, body.model)
    chat = chat_of(body)
    template = model.options.chat_template
    tools = tools_of(chat, template)
    prompt = render_chat(model, chat)
    assert template is not None
    form = form_of(chat, template, tools, prompt)
    params = chat_sampling_params(chat, form)
    if params.grammar is not None and params.grammar.field == "response_format":
        params = replace(params, grammar=replace(params.grammar, field="output_config.format"))
    message = Message(f"msg_{call.request_id}", body.model or model.options.model_name, form)
    kind = MessageEventsRenderer if body.stream else MessageRenderer
    renderer: Renderer = kind(message)
    renderer.headers = {"Cache-Control": "no-cache"} if body.stream else {}
    report_fields(call, body.__struct_fields__, WITHIN)
    return ParsedCall(
        requests=(chat_request(call.request_id, chat, prompt, params, adapter),),
        renderer=renderer,
        prompt_field="messages",
    )


def counted(model: DecodingModel, data: bytes) -> str:
    """The prompt whose tokens are to be counted."""
    body = decode_count(data)
    adapter_named(model, body.model)
    log_ignored("a request's", unknown_fields(data, body.__struct_fields__, WITHIN))
    return render_chat(model, chat_of(body))
