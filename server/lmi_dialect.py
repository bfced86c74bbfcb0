"""LMI's routes (LMI format reference, 3.1): how DJL-Serving chooses models and reports health."""

from __future__ import annotations

from aiohttp import web

from lmi_server.dialects import Dialect, ErrorForm
from lmi_server.openapi import openapi_route
from lmi_server.properties import request_properties
from lmi_server.protocols.base import HttpError
from lmi_server.protocols.chat_schema import ChatBody
from lmi_server.protocols.lmi import LmiProtocol, pretty_json
from lmi_server.protocols.lmi_schema import LmiRequest
from lmi_server.routes import GenerationHandler, Route, Service, metrics_route

_HEADERS = {
    "Pragma": "no-cache",
    "Cache-Control": "no-cache; no-store, must-revalidate, private",
    "Expires": "Thu, 01 Jan 1970 00:00:00 UTC",
}
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
        404: "no such route or model",
        405: "wrong method",
        408: "the body came too slowly",
        413: "the body is too long",
        424: "the request can't be served as written, or a step failed",
        500: "the server failed",
        503: "the server is full, not ready or stopping",
    },
)


def lmi_dialect(service: Service) -> Dialect:
    options = service.options
    protocol = LmiProtocol(options.model_name, options.lmi, options.chat_template)
    inference = InferenceHandler(service, protocol).handle

    def generates(path: str) -> Route:
        return Route(
            "*", path, inference, "generate (LMI)", bodies=(LmiRequest, ChatBody), answers=_ANSWERS
        )

    ping = PingHandler(service).handle
    routes = (
        generates("/invocations"),
        generates("/predictions/{model}"),
        generates("/predictions/{model}/{version}"),
        Route("*", "/ping", ping, "health", is_open=True, answers=("application/json",)),
        metrics_route(service),
        openapi_route(),
    )
    return Dialect(
        name="lmi", routes=routes, error=protocol.error, errors=_ERRORS, headers=_HEADERS
    )


class InferenceHandler:
    """Check the request's properties, choose the model, generate."""

    def __init__(self, service: Service, protocol: LmiProtocol) -> None:
        self._model_name = service.options.model_name
        self._generation = GenerationHandler(service, protocol.parse)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        properties = request_properties(request.headers)
        self._choose_model(request, properties)
        if request.method == "OPTIONS":
            return web.Response(body=pretty_json({}), content_type="application/json")
        if "handler" in properties:
            raise HttpError(
                400, "BadRequestException", "The handler can't be overridden in a request"
            )
        return await self._generation.handle(request)

    def _choose_model(self, request: web.Request, properties: dict[str, str]) -> None:
        """By path, then query, then header or custom attribute; one model is served."""
        name = (
            request.match_info.get("model")
            or request.query.get("model_name")
            or properties.get("model_name")
        )
        served = self._model_name
        if name is not None and name != served:
            raise HttpError(404, "ModelNotFoundException", f"Model or workflow not found: {name}")
        version = request.match_info.get("version")
        if version is not None:
            raise HttpError(
                404,
                "ModelNotFoundException",
                f"Model or workflow not found: {served}:{version} (the model has no versions)",
            )


class PingHandler:
    """Health as a map from model to status; 500 once the engine has failed."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle(self, request: web.Request) -> web.Response:
        healthy = self._service.backend.healthy
        status = {"status": "Healthy" if healthy else "FAILED"}
        return web.Response(
            status=200 if healthy else 500,
            body=pretty_json({self._service.options.model_name: status}),
            content_type="application/json",
        )
