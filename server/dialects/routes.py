"""Routes, what their handlers share, and the handlers that any protocol can use."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

from aiohttp import web

from lmi_core.errors import UserError
from lmi_server.dialects.base import AdapterNames, Call, HttpError, Plan
from lmi_server.dialects.large_bodies import ParseCall, decoded
from lmi_server.dialects.unknown_fields import collect_ignored, refuse_ignored
from lmi_server.http.admission import Admission
from lmi_server.http.metrics import CONTENT_TYPE, LoopLag, Metrics, RequestMeter
from lmi_server.http.options import ServerOptions
from lmi_server.http.properties import request_properties
from lmi_server.http.streaming import respond
from lmi_server.models.backend import AdapterHost, Backend

if TYPE_CHECKING:
    from lmi_server.models.model_registry import ModelRegistry

T = TypeVar("T")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

Read = Callable[[web.Request, Call], AbstractAsyncContextManager[Call]]
"""Makes another call of one, for as long as the block lasts."""

IGNORED = web.RequestKey("ignored", list[str])
"""Fields of the request that nobody here knows."""
METER = web.RequestKey("meter", RequestMeter)
"""Set for every request before its handler runs."""


@dataclass(frozen=True, slots=True)
class Service:
    """What the handlers of one model share."""

    options: ServerOptions
    backend: Backend
    admission: Admission
    metrics: Metrics
    loop_lag: LoopLag
    models: ModelRegistry
    """Every model of the server."""

    @property
    def adapter_host(self) -> AdapterHost | None:
        """The backend, where LoRA is enabled."""
        return cast(AdapterHost, self.backend) if self.options.has_lora else None

    @property
    def adapter_names(self) -> AdapterNames | None:
        """None: LoRA is not enabled."""
        host = self.adapter_host
        return None if host is None else partial(getattr, host, "adapters")


@dataclass(frozen=True, slots=True)
class Route:
    """``method`` "*" answers any method, as DJL-Serving does on inference paths."""

    method: str
    path: str
    handler: Handler
    purpose: str
    is_open: bool = False
    """Needs no API key: what load balancers ask for health."""
    bodies: tuple[type, ...] = ()
    """The schemas that a body may have; none: it has no body."""
    answers: tuple[str, ...] = ()
    """Content types of successful answers; none: they have no body."""
    is_server_wide: bool = False
    """About all models: no model is chosen for it."""
    is_management: bool = False
    """Changes what is served: exists only on the loopback interface or with an admin key."""


def management_route(method: str, path: str, handler: Handler, purpose: str) -> Route:
    return Route(
        method,
        path,
        handler,
        purpose,
        is_server_wide=True,
        is_management=True,
        answers=("application/json",),
    )


async def read_body(
    service: Service,
    request: web.Request,
    decode: Callable[[bytes], T],
    body: bytes,
    *,
    beside: bytes = b"",
) -> T:
    """What ``decode`` makes of a body; fields that nobody knows are noted, and refused by a server
    that is strict. Arguments and errors are those of ``decoded``."""
    request[IGNORED] = ignored = collect_ignored()
    value = await decoded(decode, body, service.backend, beside=beside)
    if service.options.strict_requests:
        refuse_ignored(ignored)
    return value


class GenerationHandler:
    """Admit, read, parse, run, answer: what every route that generates does."""

    def __init__(
        self, service: Service, parse: Callable[[Call], Plan], read: Read | None = None
    ) -> None:
        self._service = service
        self._parse = parse
        self._read = read
        self._call_numbers = itertools.count()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        service = self._service
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
                headers=request_properties(request.headers),
                query=request.query,
            )
            if self._read is None:
                return await self._answer(request, call)
            async with self._read(request, call) as call:
                return await self._answer(request, call)

    async def plan(self, request: web.Request, call: Call, *, beside: bytes = b"") -> Plan:
        """What a call asks for; ``beside``: JSON that is decoded with its body."""
        parse = ParseCall(self._parse, call)
        return await read_body(self._service, request, parse, call.body, beside=beside)

    async def _answer(self, request: web.Request, call: Call) -> web.StreamResponse:
        service = self._service
        plan = await self.plan(request, call)
        try:
            return await respond(
                request,
                service.backend,
                plan,
                request[METER],
                send_timeout_s=service.options.send_timeout_s,
                limits=service.options.limits,
            )
        except UserError as error:
            if error.field == "prompt":
                error.field = plan.prompt_field
            raise


class MetricsHandler:
    """Answers a scrape; ``name[]`` asks for some metrics only."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle(self, request: web.Request) -> web.Response:
        return web.Response(
            body=self._service.metrics.render(request.query.getall("name[]", ())),
            headers={"Content-Type": CONTENT_TYPE},
        )


def metrics_route(service: Service, path: str = "/metrics") -> Route:
    handler = MetricsHandler(service).handle
    return Route(
        "GET",
        path,
        handler,
        "Prometheus metrics",
        is_server_wide=True,
        answers=("text/plain",),
    )
