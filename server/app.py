"""The aiohttp application: routes, request ids, common headers, errors in the protocol's format."""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from lmi_core.errors import LmiError
from lmi_core.version import __version__
from lmi_server.access import Access
from lmi_server.admission import Admission
from lmi_server.backend import Backend
from lmi_server.connections import Connection, Refuse
from lmi_server.dialects import Dialect, DialectTable
from lmi_server.lmi_dialect import lmi_dialect
from lmi_server.logging import log_access
from lmi_server.metrics import LoopLag, Metrics, RequestMeter
from lmi_server.openai_dialect import openai_dialect
from lmi_server.openapi import TABLE
from lmi_server.options import ServerOptions
from lmi_server.protocols.base import HttpError, Reply
from lmi_server.routes import METER, Route, Service
from lmi_server.tgi_dialect import tgi_dialect

log = logging.getLogger(__name__)

SERVICE = web.AppKey("service", Service)
ROUTES: web.AppKey[Sequence[Route]] = web.AppKey("routes", Sequence)
"""Those without a dialect's prefix."""
REFUSE: web.AppKey[Refuse] = web.AppKey("refuse", Callable)  # type: ignore[arg-type]
"""Answers what isn't HTTP."""

DIALECTS: tuple[Callable[[Service], Dialect], ...] = (lmi_dialect, openai_dialect, tgi_dialect)
"""Every dialect that a server has."""

_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_CLIENT_CLOSED = 499
_SERVER = f"lmi/{__version__}"
_HTTP_ERRORS = {
    404: "ResourceNotFoundException",
    405: "MethodNotAllowedException",
    413: "PayloadTooLargeException",
}


def build_app(backend: Backend, options: ServerOptions, metrics: Metrics) -> web.Application:
    """An application that serves ``backend``."""
    admission = Admission(
        max_in_flight=options.max_in_flight,
        max_request_bytes=options.max_request_bytes,
        receive_timeout_s=options.receive_timeout_s,
    )
    metrics.engine.read_from(backend.stats)
    metrics.in_flight.set_function(lambda: admission.num_in_flight)
    service = Service(
        options=options,
        backend=backend,
        admission=admission,
        metrics=metrics,
        loop_lag=LoopLag(metrics, busy=lambda: admission.num_in_flight > 0),
    )
    table = DialectTable([dialect(service) for dialect in DIALECTS], options.api)
    access = Access(
        options.api_keys,
        options.cors_origins,
        methods=options.cors_methods,
        headers=options.cors_headers,
    )
    app = web.Application(
        middlewares=[_front(service, table, access)],
        client_max_size=options.max_request_bytes,
    )
    app.on_response_prepare.append(_common_headers(table, access, options.request_id_header))
    app[SERVICE] = service
    app[TABLE] = table
    app[ROUTES] = list(table.routes())
    app[REFUSE] = _refuser(service, table)
    expect = _expectations(table, options.max_request_bytes)
    for route in (*app[ROUTES], *table.prefixed_routes()):
        methods = ("GET", "HEAD") if route.method == "GET" else (route.method,)
        for method in methods:
            app.router.add_route(method, route.path, access.guard(route), expect_handler=expect)
    return app


def _front(service: Service, table: DialectTable, access: Access) -> Middleware:
    """The outermost layer: identify and time the request, render errors, log one line."""
    id_header = service.options.request_id_header

    @web.middleware
    async def front(request: web.Request, handler: Handler) -> web.StreamResponse:
        connection = request.protocol
        if isinstance(connection, Connection):
            connection.request_arrived()
        meter = request[METER] = RequestMeter(_request_id(request, id_header))
        status = _CLIENT_CLOSED
        try:
            response = access.preflight(request) or await handler(request)
            status = response.status
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception as error:
            dialect = table.of(request.path)
            response = _reply(dialect.error(_explain(error, request, meter.request_id)))
            status = response.status
        finally:
            if isinstance(connection, Connection):
                connection.request_finished()
            _finish(service, request.method, request.path, meter, status)
        return response

    return front


def _refuser(service: Service, table: DialectTable) -> Refuse:
    """Answers what the HTTP library can't parse, of which there is no request."""

    def refuse(path: str, error: HttpError) -> web.Response:
        meter = RequestMeter(str(uuid.uuid4()))
        dialect = table.of(path) if path else table.main
        response = _reply(dialect.error(error))
        response.headers.update({**dialect.headers, "Server": _SERVER})
        response.headers[service.options.request_id_header] = meter.request_id
        _finish(service, "-", path, meter, response.status)
        return response

    return refuse


def _expectations(
    table: DialectTable, max_request_bytes: int
) -> Callable[[web.Request], Awaitable[web.StreamResponse | None]]:
    """What is done about ``Expect``: a body that will be refused is not asked for."""

    async def expect(request: web.Request) -> web.StreamResponse | None:
        expected = request.headers.get("Expect", "")
        if expected.lower() != "100-continue":
            kind, message = "ExpectationFailedException", f"Expect: {expected[:80]} is not known"
            return _reply(table.of(request.path).error(HttpError(417, kind, message)))
        if (request.content_length or 0) <= max_request_bytes:
            with suppress(ConnectionError):  # reading the body will notice
                await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0
        return None

    return expect


def _finish(service: Service, method: str, path: str, meter: RequestMeter, status: int) -> None:
    seconds = meter.seconds
    service.metrics.count_answer(status, seconds)
    log_access(
        id=meter.request_id,
        method=method,
        path=path,
        status=status,
        ms=round(seconds * 1000, 1),
        prompt_tokens=meter.num_prompt_tokens,
        generated_tokens=meter.num_generated_tokens,
    )


def _request_id(request: web.Request, header: str) -> str:
    """The client's own id when it is a plain one, so that it can be found in logs."""
    given = request.headers.get(header, "")
    return given if _REQUEST_ID.fullmatch(given) else str(uuid.uuid4())


def _explain(error: Exception, request: web.Request, request_id: str) -> Exception:
    """Turn the HTTP library's errors into ours; log what nobody expected."""
    if isinstance(error, HttpError | LmiError):
        return error
    if isinstance(error, web.HTTPException):
        headers = {}
        message = f"{request.method} {request.path} is not a route of this server"
        if isinstance(error, web.HTTPMethodNotAllowed):
            allowed = headers["Allow"] = ", ".join(sorted(error.allowed_methods))
            message = f"{request.path} does not allow {request.method}; allowed are {allowed}"
        kind = _HTTP_ERRORS.get(error.status, "BadRequestException")
        return HttpError(error.status, kind, message, headers=headers)
    log.error("request %s failed", request_id, exc_info=error)
    return RuntimeError(f"The request failed inside the server; incident {request_id}")


def _reply(reply: Reply) -> web.Response:
    response = web.Response(
        status=reply.status,
        body=reply.body,
        headers={**reply.headers, "Content-Type": reply.content_type},
    )
    if reply.close or reply.status >= 400:
        response.force_close()
    return response


def _common_headers(
    table: DialectTable, access: Access, id_header: str
) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    async def add(request: web.Request, response: web.StreamResponse) -> None:
        meter = request.get(METER)
        headers = response.headers
        for name, value in table.of(request.path).headers.items():
            headers.setdefault(name, value)
        headers["Server"] = _SERVER
        headers.update(access.cors_headers(request.headers))
        if meter is not None:
            headers[id_header] = meter.request_id
        if response.keep_alive is not False:
            headers["Connection"] = "keep-alive"

    return add
