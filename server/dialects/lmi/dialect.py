"""LMI's routes (LMI format reference, 3.1): how DJL-Serving chooses models and reports health."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from aiohttp import web

from lmi_server.dialects.base import HttpError
from lmi_server.dialects.lmi.custom_code_calls import CustomCodeCalls
from lmi_server.dialects.lmi.formatting import FormattingBackend
from lmi_server.dialects.lmi.lmi import LmiProtocol, pretty_json
from lmi_server.dialects.lmi.schema import LmiRequest
from lmi_server.dialects.lmi.server_routes import server_routes
from lmi_server.dialects.openai.chat_schema import ChatBody
from lmi_server.dialects.openai.completion_schema import CompletionBody, infill_of
from lmi_server.dialects.routes import GenerationHandler, Handler, Route, Service, metrics_route
from lmi_server.dialects.table import Dialect, ErrorForm
from lmi_server.http.openapi import openapi_route
from lmi_server.http.properties import request_properties
from lmi_server.management.adapters import adapter_routes
from lmi_server.management.routes import management_routes
from lmi_server.models.custom_code_backend import CustomCodeBackend

_WORSE = ("Healthy", "Unhealthy", "PENDING", "FAILED")
_HEADERS = {
    "Pragma": "no-cache",
    "Cache-Control": "no-cache; no-store, must-revalidate, private",
    "Expires": "Thu, 01 Jan 1970 00:00:00 UTC",
}
_BODIES = (LmiRequest, ChatBody, CompletionBody)
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


def lmi_dialect(service: Service) -> Dialect:
    options = service.options
    protocol = LmiProtocol(
        options.model_name,
        options.lmi,
        options.chat_template,
        service.adapter_names,
        partial(infill_of, service.backend),
    )
    inference = InferenceHandler(service, protocol).handle

    def generates(path: str) -> Route:
        return Route("*", path, inference, "generate (LMI)", bodies=_BODIES, answers=_ANSWERS)

    ping = PingHandler(service).handle
    routes = (
        generates("/invocations"),
        generates("/predictions/{model}"),
        generates("/predictions/{model}/{version}"),
        generates("/models/{model}/invoke"),
        Route(
            "*",
            "/ping",
            ping,
            "health",
            is_open=True,
            is_server_wide=True,
            answers=("application/json",),
        ),
        *adapter_routes(service),
        *management_routes(service),
        metrics_route(service),
        *server_routes(service),
        openapi_route(),
    )
    return Dialect(
        name="lmi", routes=routes, error=protocol.error, errors=_ERRORS, headers=_HEADERS
    )


class InferenceHandler:
    """Check the request's properties, choose the model, generate."""

    def __init__(self, service: Service, protocol: LmiProtocol) -> None:
        self._model_name = service.options.model_name
        self._version = service.options.model_version
        backend = service.backend
        self._handle: Handler
        if isinstance(backend, CustomCodeBackend):
            self._handle = CustomCodeCalls(service, backend).handle
        else:
            read = backend.reader if isinstance(backend, FormattingBackend) else None
            self._handle = GenerationHandler(service, protocol.parse, read).handle

    async def handle(self, request: web.Request) -> web.StreamResponse:
        properties = request_properties(request.headers)
        self._choose_model(request, properties)
        if request.method == "OPTIONS":
            return web.Response(body=pretty_json({}), content_type="application/json")
        _refuse_unavailable(properties)
        if "handler" in properties:
            raise HttpError(
                400, "BadRequestException", "The handler can't be overridden in a request"
            )
        return await self._handle(request)

    def _choose_model(self, request: web.Request, properties: dict[str, str]) -> None:
        """Refuse a name, in path, query, header or custom attribute, that isn't this model's."""
        name = (
            request.match_info.get("model")
            or request.query.get("model_name")
            or properties.get("model_name")
        )
        served = self._model_name
        if name is not None and name != served:
            raise HttpError(404, "ModelNotFoundException", f"Model or workflow not found: {name}")
        version = (
            request.match_info.get("version")
            or request.query.get("model_version")
            or properties.get("model_version")
        )
        if version is not None and version != self._version:
            having = self._version or "no versions"
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


class PingHandler:
    """Health as a map from model to status: 500 once a model has failed; while one is loading,
    200, or 207 with ``allow_multi_status``; 503 once an error rate was exceeded."""

    def __init__(self, service: Service) -> None:
        self._models = service.models
        self._pending = 207 if service.options.allow_multi_status else 200

    async def handle(self, request: web.Request) -> web.Response:
        # Versions of a name share its key: the worst of them counts.
        states: dict[str, str] = {}
        for model in self._models:
            known = states.get(model.name, "Healthy")
            states[model.name] = max(known, model.status, key=_WORSE.index)
        status = 200
        if self._models.error_rates.exceeded is not None:
            status = 503
        elif "FAILED" in states.values():
            status = 500
        elif "PENDING" in states.values():
            status = self._pending
        return web.Response(
            status=status,
            body=pretty_json({name: {"status": state} for name, state in states.items()}),
            content_type="application/json",
        )
