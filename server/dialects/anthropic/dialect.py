"""Anthropic's routes: ``/v1/messages``, which agents speak that were written for it."""

from __future__ import annotations

from functools import partial

from aiohttp import web

from lmi_server.batches.messages import MESSAGE_BATCH_ROUTES
from lmi_server.dialects.anthropic.errors import anthropic_error
from lmi_server.dialects.anthropic.protocol import counted, parse_messages
from lmi_server.dialects.anthropic.schema import CountBody, MessagesBody
from lmi_server.dialects.generation import generate, read_known
from lmi_server.dialects.openai.openai import check_content_type
from lmi_server.dialects.routes import ModelRoute
from lmi_server.dialects.table import USUAL_STATUSES, Dialect, ErrorForm
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
    statuses=USUAL_STATUSES,
)


async def create(request: web.Request, model: LoadedModel) -> web.StreamResponse:
    return await generate(request, model, partial(parse_messages, model))


async def count(request: web.Request, model: LoadedModel) -> web.Response:
    with model.admission.enter():
        check_content_type(request.headers.get("Content-Type", ""))
        body = await model.admission.read_body(request)
        prompt = await read_known(request, model, partial(counted, model), body)
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
        *MESSAGE_BATCH_ROUTES,
    ),
    error=lambda error, _: anthropic_error(error),
    errors=_ERRORS,
    prefixes=("/v1/messages",),
)
