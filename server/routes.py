"""Routes and their handlers; what a body means is left to the protocol."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from lmi_server.admission import Admission
from lmi_server.backend import Backend
from lmi_server.metrics import CONTENT_TYPE, LoopLag, Metrics, RequestMeter
from lmi_server.options import ServerOptions
from lmi_server.properties import request_properties
from lmi_server.protocols.base import Call, HttpError, Protocol
from lmi_server.protocols.lmi import pretty_json
from lmi_server.streaming import respond

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

METER = web.RequestKey("meter", RequestMeter)
"""Set for every request before its handler runs."""


@dataclass(frozen=True, slots=True)
class Service:
    """What handlers share."""

    options: ServerOptions
    backend: Backend
    admission: Admission
    metrics: Metrics
    loop_lag: LoopLag


@dataclass(frozen=True, slots=True)
class Route:
    """``method`` "*" answers any method, as DJL-Serving does on inference paths."""

    method: str
    path: str
    handler: Handler
    purpose: str


def lmi_routes(service: Service, protocol: Protocol) -> list[Route]:
    """LMI's inference routes (LMI format reference, 3.1)."""
    inference = InferenceHandler(service, protocol).handle
    purpose = "generate (LMI)"
    return [
        Route("*", "/invocations", inference, purpose),
        Route("*", "/predictions/{model}", inference, purpose),
        Route("*", "/predictions/{model}/{version}", inference, purpose),
        Route("*", "/ping", PingHandler(service).handle, "health"),
    ]


def common_routes(service: Service) -> list[Route]:
    return [Route("GET", "/metrics", MetricsHandler(service).handle, "Prometheus metrics")]


class InferenceHandler:
    """Choose the model, admit, read, parse, run, answer."""

    def __init__(self, service: Service, protocol: Protocol) -> None:
        self._service = service
        self._protocol = protocol
        self._call_numbers = itertools.count()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        service = self._service
        properties = request_properties(request.headers)
        self._choose_model(request, properties)
        if request.method == "OPTIONS":
            return web.Response(body=pretty_json({}), content_type="application/json")
        if "handler" in properties:
            raise HttpError(
                400, "BadRequestException", "The handler can't be overridden in a request"
            )
        if not service.backend.healthy:
            raise HttpError(
                503, "WlmException", f"Model is not ready: {service.options.model_name}"
            )
        with service.admission.enter():
            service.loop_lag.wake()
            meter = request[METER]
            call = Call(
                # Clients may reuse their ids at the same time; the engine's must be unique.
                request_id=f"{meter.request_id}-{next(self._call_numbers)}",
                body=await service.admission.read_body(request),
                content_type=request.headers.get("Content-Type", ""),
                headers=properties,
            )
            plan = self._protocol.parse(call)
            return await respond(
                request,
                service.backend,
                plan,
                meter,
                send_timeout_s=service.options.send_timeout_s,
            )

    def _choose_model(self, request: web.Request, properties: dict[str, str]) -> None:
        """By path, then query, then header or custom attribute; one model is served."""
        name = (
            request.match_info.get("model")
            or request.query.get("model_name")
            or properties.get("model_name")
        )
        served = self._service.options.model_name
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


class MetricsHandler:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle(self, request: web.Request) -> web.Response:
        return web.Response(
            body=self._service.metrics.render(), headers={"Content-Type": CONTENT_TYPE}
        )
