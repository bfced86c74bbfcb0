"""TGI's routes (TGI format reference, 3.1): admission, streams whose errors are events, health."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aiohttp import web

from lmi_core.errors import CapacityError, LmiError
from lmi_server.dialects import Dialect
from lmi_server.protocols import tgi_errors
from lmi_server.protocols.base import HttpError
from lmi_server.protocols.tgi import (
    Generation,
    TgiProtocol,
    check_content_type,
    decode_compat,
    decode_generate,
)
from lmi_server.protocols.tgi_events import error_event
from lmi_server.routes import METER, Route, Service, metrics_route
from lmi_server.streaming import respond


def tgi_dialect(service: Service) -> Dialect:
    tgi = TgiService(service)
    health = HealthHandler(service).handle

    def generates(path: str, decode: Callable[[bytes], Generation]) -> Route:
        return Route("POST", path, GenerateHandler(tgi, decode).handle, "generate (TGI)")

    routes = (
        generates("/", decode_compat),
        generates("/generate", lambda body: decode_generate(body, streams=False)),
        generates("/generate_stream", lambda body: decode_generate(body, streams=True)),
        *(Route("GET", path, health, "health", is_open=True) for path in ("/", "/health", "/ping")),
        metrics_route(service),
    )
    return Dialect(name="tgi", routes=routes, error=tgi_errors.reply)


class Permits:
    """How many sequences run or wait at once."""

    def __init__(self, limit: int) -> None:
        self._num_free = limit

    @contextmanager
    def take(self, num_permits: int) -> Iterator[None]:
        """Hold permits; CapacityError when there aren't enough."""
        if num_permits > self._num_free:
            raise CapacityError("too many requests are being served (max_concurrent_requests)")
        self._num_free -= num_permits
        try:
            yield
        finally:
            self._num_free += num_permits


class TgiService:
    """What this dialect's handlers share."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.options = service.options.tgi
        self.protocol = TgiProtocol(self.options, service.backend)
        self.permits = Permits(self.options.max_concurrent_requests)
        self._call_numbers = itertools.count()

    async def read_json(self, request: web.Request) -> bytes:
        """A body that claims to be JSON."""
        check_content_type(request.headers.get("Content-Type", ""))
        return await self.service.admission.read_body(request)

    async def generate(self, request: web.Request, generation: Generation) -> web.StreamResponse:
        """Check, run and answer. Once a stream is asked for, errors are events of it."""
        try:
            with self.permits.take(self.protocol.num_sequences(generation)):
                meter = request[METER]
                plan = await self.protocol.plan(
                    generation,
                    # Clients may reuse their ids at the same time; the engine's must be unique.
                    request_id=f"{meter.request_id}-{next(self._call_numbers)}",
                    started_s=meter.started,
                )
                return await respond(
                    request,
                    self.service.backend,
                    plan,
                    meter,
                    send_timeout_s=self.service.options.send_timeout_s,
                )
        except LmiError as error:
            if not generation.streams:
                raise
            return web.Response(
                body=error_event(error, self.options.version),
                headers={
                    **self.protocol.headers(generation),
                    "Content-Type": "text/event-stream",
                },
            )


class GenerateHandler:
    """A route that generates, by the function that decodes its bodies."""

    def __init__(self, tgi: TgiService, decode: Callable[[bytes], Generation]) -> None:
        self._tgi = tgi
        self._decode = decode

    async def handle(self, request: web.Request) -> web.StreamResponse:
        tgi = self._tgi
        with tgi.service.admission.enter():
            tgi.service.loop_lag.wake()
            generation = self._decode(await tgi.read_json(request))
            return await tgi.generate(request, generation)


class HealthHandler:
    """200 and no body while the engine works."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle(self, request: web.Request) -> web.Response:
        if not self._service.backend.healthy:
            raise HttpError(503, "healthcheck", "unhealthy")
        return web.Response(content_type="text/plain")
