"""Anthropic's routes: ``/v1/messages``, which agents speak that were written for it."""

from __future__ import annotations

from dataclasses import replace

from aiohttp import web

from lmi_server.dialects.anthropic.errors import anthropic_error
from lmi_server.dialects.anthropic.output import Message, MessageEventsRenderer, MessageRenderer
from lmi_server.dialects.anthropic.schema import (
    WITHIN,
    CountBody,
    MessagesBody,
    chat_of,
    decode_count,
    decode_messages,
)
from lmi_server.dialects.base import Call, ParsedCall, Renderer
from lmi_server.dialects.generation import generate, read_known
from lmi_server.dialects.openai.chat_schema import (
    chat_request,
    chat_sampling_params,
    form_of,
    tools_of,
)
from lmi_server.dialects.openai.openai import check_content_type, openai_protocol
from lmi_server.dialects.routes import ModelRoute
from lmi_server.dialects.table import Dialect, ErrorForm
from lmi_server.dialects.unknown_fields import log_ignored, report_unknown, unknown_fields
from lmi_server.models.loaded_model import LoadedModel

_JSON = ("application/json",)
_ERRORS = ErrorForm(
    schema={
        "type": "object",
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
                "required": ["type", "message"],
            },
        },
        "required": ["type", "error"],
    },
    statuses={
        400: "the request can't be served as written",
        401: "the API key is missing or wrong",
        404: "no such route or model",
        405: "wrong method",
        408: "the body came too slowly",
        413: "the body is too long",
        415: "the body isn't JSON",
        429: "the server is full",
        500: "the server failed",
        503: "the server is not ready or stopping",
    },
)


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
        unknown = unknown_fields(call.body, body.__struct_fields__, WITHIN)
        report_unknown(call.request_id, unknown, "fields")
        return ParsedCall(
            requests=(chat_request(call.request_id, chat, prompt, params, adapter),),
            renderer=renderer,
            prompt_field="messages",
            headers={"Cache-Control": "no-cache"} if body.stream else {},
        )

    def counted(self, data: bytes) -> str:
        """The prompt whose tokens are to be counted."""
        body = decode_count(data)
        self._chats.adapter_named(body.model)
        log_ignored("a request's", unknown_fields(data, body.__struct_fields__, WITHIN))
        return self._chats.render_chat(chat_of(body))


async def create(request: web.Request, model: LoadedModel) -> web.StreamResponse:
    return await generate(request, model, model.of(MessagesProtocol).parse)


async def count(request: web.Request, model: LoadedModel) -> web.Response:
    with model.admission.enter():
        check_content_type(request.headers.get("Content-Type", ""))
        body = await model.admission.read_body(request)
        prompt = await read_known(request, model, model.of(MessagesProtocol).counted, body)
        ids = await model.tokenizes.encode(prompt, add_special_tokens=False)
    return web.json_response({"input_tokens": len(ids)})


ANTHROPIC = Dialect(
    name="anthropic",
    routes=(
        ModelRoute(
            "POST",
            "/v1/messages",
            create,
            "messages (Anthropic)",
            bodies=(MessagesBody,),
            answers=(*_JSON, "text/event-stream"),
        ),
        ModelRoute(
            "POST",
            "/v1/messages/count_tokens",
            count,
            "tokens of messages (Anthropic)",
            bodies=(CountBody,),
            answers=_JSON,
        ),
    ),
    error=lambda error, _: anthropic_error(error),
    errors=_ERRORS,
    prefixes=("/v1/messages",),
)
