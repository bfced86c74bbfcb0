"""LMI's routes: models are chosen, and health is reported, as by InferenceRequestHandler.java."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from aiohttp import web

from lmi_server.dialects.base import HttpError
from lmi_server.dialects.generation import Parse, generate
from lmi_server.dialects.lmi.custom_code_calls import call_custom_code
from lmi_server.dialects.lmi.errors import lmi_error, pretty_json
from lmi_server.dialects.lmi.formatting import FormattingBackend
from lmi_server.dialects.lmi.lmi import parse_invocation
from lmi_server.dialects.lmi.pooling import EmbeddingBody, PairBody, parse_embedding, parse_pairs
from lmi_server.dialects.lmi.schema import LmiRequest
from lmi_server.dialects.lmi.server_routes import SERVER_ROUTES
from lmi_server.dialects.lmi.sessions import answer_in_session
from lmi_server.dialects.openai.chat_schema import ChatBody
from lmi_server.dialects.openai.completion_schema import CompletionBody
from lmi_server.dialects.pooling import pooling_of
from lmi_server.dialects.routes import ModelRoute, ServerRoute, metrics_route
from lmi_server.dialects.table import Dialect, ErrorForm
from lmi_server.http.openapi import openapi_route
from lmi_server.http.options import ServerOptions
from lmi_server.http.properties import request_properties
from lmi_server.management.adapters import ADAPTER_ROUTES
from lmi_server.management.routes import MANAGEMENT_ROUTES
from lmi_server.models.custom_code_backend import CustomCodeBackend
from lmi_server.models.loaded_model import LoadedModel
from lmi_server.models.model_registry import ModelRegistry

_WORSE = ("Healthy", "Unhealthy", "PENDING", "FAILED")
_HEADERS = {
    "Pragma": "no-cache",
    "Cache-Control": "no-cache; no-store, must-revalidate, private",
    "Expires": "Thu, 01 Jan 1970 00:00:00 UTC",
}
_BODIES = (LmiRequest, ChatBody, CompletionBody, EmbeddingBody, PairBody)
_ANSWERS = ("application/json", "application/jsonlines", "text/event-stream")
_ERRORS = ErrorForm(
    schema={
        "type": "object",
        "properties": {
            "code": {"type": "integer"},
            "error": {"type": "string"},
            "type": {"type": "string"},
            "message": {"type": "string"},
        },
        "required": ["code"],
    },
    statuses={
        400: "not HTTP, or what a request may not say",
        401: "the API key is missing or wrong",
        403: "management by who may not, or of what may not be loaded",
        404: "no such route or model",
        405: "wrong method",
        408: "the body came too slowly",
        409: "there is a model of that name and version",
        413: "the body is too long",
        424: "the request can't be served as written, or a step failed",
        500: "the server failed",
        503: "the server is full, not ready or stopping",
        507: "the model needs more memory than there is",
    },
)


async def invoke(request: web.Request, model: LoadedModel) -> web.StreamResponse:
    """Check the request's properties and the names of models in it, generate."""
    properties = request_properties(request.headers)
    _check_model(request, properties, model.options)
    if request.method == "OPTIONS":
        return web.Response(body=pretty_json({}), content_type="application/json")
    _refuse_unavailable(properties)
    if "handler" in properties:
        raise HttpError(400, "BadRequestException", "The handler can't be overridden in a request")
    backend = model.backend
    if isinstance(backend, CustomCodeBackend):
        return await call_custom_code(request, model, backend)
    read = backend.reader if isinstance(backend, FormattingBackend) else None
    parse: Parse = partial(parse_invocation, model)
    if (pooling := pooling_of(model)) is not None:
        parse = parse_embedding if pooling.task == "embed" else parse_pairs
    answer = await answer_in_session(request, model, properties, parse, read)
    if answer is not None:
        return answer
    return await generate(request, model, parse, read)


def _check_model(
    request: web.Request, properties: Mapping[str, str], options: ServerOptions
) -> None:
    """Refuse a name, in path, query, header or custom attribute, that isn't this model's."""
    name = (
        request.match_info.get("model")
        or request.query.get("model_name")
        or properties.get("model_name")
    )
    served = options.model_name
    if name is not None and name != served:
        raise HttpError(404, "ModelNotFoundException", f"Model or workflow not found: {name}")
    version = (
        request.match_info.get("version")
        or request.query.get("model_version")
        or properties.get("model_version")
    )
    if version is not None and version != options.model_version:
        having = options.model_version or "no versions"
        raise HttpError(
            404,
            "ModelNotFoundException",
            f"Model or workflow not found: {served}:{version} (the model has {having})",
        )


def _refuse_unavailable(properties: Mapping[str, str]) -> None:
    """Properties that ask for an answer of another kind: neither is ignored."""
    if properties.get("x-synchronous", "").lower() == "false" or "x-starting-token" in properties:
        raise HttpError(
            400,
            "BadRequestException",
            "Answers to be fetched later (x-synchronous: false, x-starting-token) are not "
            "available in this version; leave the header out",
        )


async def ping(request: web.Request, models: ModelRegistry) -> web.Response:
    """Health as a map from model to status: 500 once a model has failed; while one is loading,
    200, or 207 with ``allow_multi_status``; 503 once an error rate was exceeded."""
    # Versions of a name share its key: the worst of them counts.
    states: dict[str, str] = {}
    for model in models:
        known = states.get(model.name, "Healthy")
        states[model.name] = max(known, model.status, key=_WORSE.index)
    status = 200
    if models.error_rates.exceeded is not None:
        status = 503
    elif "FAILED" in states.values():
        status = 500
    elif "PENDING" in states.values() and models.options.allow_multi_status:
        status = 207
    return web.Response(
        status=status,
        body=pretty_json({name: {"status": state} for name, state in states.items()}),
        content_type="application/json",
    )


def _generates(path: str) -> ModelRoute:
    return ModelRoute("*", path, invoke, "generate (LMI)", bodies=_BODIES, answers=_ANSWERS)


LMI = Dialect(
    name="lmi",
    routes=(
        _generates("/invocations"),
        _generates("/predictions/{model}"),
        _generates("/predictions/{model}/{version}"),
        _generates("/models/{model}/invoke"),
        ServerRoute("*", "/ping", ping, "health", is_open=True, answers=("application/json",)),
        *ADAPTER_ROUTES,
        *MANAGEMENT_ROUTES,
        metrics_route(),
        *SERVER_ROUTES,
        openapi_route(),
    ),
    error=lmi_error,
    errors=_ERRORS,
    headers=_HEADERS,
)
