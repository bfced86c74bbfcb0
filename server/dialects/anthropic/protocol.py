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
from lmi_server.dialects.openai.openai import check_content_type, openai_protocol
from lmi_server.dialects.unknown_fields import log_ignored, report_unknown, unknown_fields
from lmi_server.models.loaded_model import LoadedModel


class MessagesProtocol:
    """Parses calls, as chats under other names."""

    def __init__(self, model: LoadedModel) -> None:
        self._template = model.options.chat_template
        self._model_name = model.options.model_name
        self._chats = model.of(openai_protocol)

    def parse(self, call: Call) -> ParsedCall:
        check_content_type(call.content_type)
        body = decode_messages(call.body)
        adapter = self._chats.adapter_named(body.model)
        chat = chat_of(body)
        tools = tools_of(chat, self._template)
        prompt = self._chats.render_chat(chat)
        assert self._template is not None
        form = form_of(chat, self._template, tools, prompt)
        params = chat_sampling_params(chat, form)
        if params.grammar is not None and params.grammar.field == "response_format":
            params = replace(params, grammar=replace(params.grammar, field="output_config.format"))
        message = Message(f"msg_{call.request_id}", body.model or self._model_name, form)
        kind = MessageEventsRenderer if body.stream else MessageRenderer
        renderer: Renderer = kind(message)
        renderer.headers = {"Cache-Control": "no-cache"} if body.stream else {}
        unknown = unknown_fields(call.body, body.__struct_fields__, WITHIN)
        report_unknown(call.request_id, unknown, "fields")
        return ParsedCall(
            requests=(chat_request(call.request_id, chat, prompt, params, adapter),),
            renderer=renderer,
            prompt_field="messages",
        )

    def counted(self, data: bytes) -> str:
        """The prompt whose tokens are to be counted."""
        body = decode_count(data)
        self._chats.adapter_named(body.model)
        log_ignored("a request's", unknown_fields(data, body.__struct_fields__, WITHIN))
        return self._chats.render_chat(chat_of(body))
