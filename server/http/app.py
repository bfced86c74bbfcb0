"""The aiohttp application: routes, request ids, common headers, errors in the protocol's format."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from lmi_core.config.address import is_loopback
from lmi_core.errors import CapacityError, LmiError
from lmi_core.sandbox.pool import CLIENT
from lmi_core.settings.batch_config import BatchConfig
from lmi_server.batches.runner import BATCHES, BatchRunner
from lmi_server.dialects.base import HttpError
from lmi_server.dialects.dialects import DIALECTS
from lmi_server.dialects.routes import Route
from lmi_server.dialects.table import Dialect, DialectTable
from lmi_server.dialects.unknown_fields import IGNORED, IGNORED_HEADER
from lmi_server.http.access import Access
from lmi_server.http.connections import Connection, Refuse
from lmi_server.http.load_report import load_report
from lmi_server.http.logging import RefusalLog, log_access
from lmi_server.http.metrics import METER, Metrics, RequestMeter
from lmi_server.http.openapi import TABLE
from lmi_server.http.options import ServerOptions
from lmi_server.http.refusals import SERVER, Refused, response_of
from lmi_server.http.ui import UI_ROUTES, page_at_root
from lmi_server.management.audit import SAID, audited, log_call
from lmi_server.models.custom_code_backend import CustomCodeBackend
from lmi_server.models.loaded_model import LoadedModel
from lmi_server.models.model_choice import MODEL, ModelChoice, handler_of
from lmi_server.models.model_registry import MODELS, ModelRegistry

log = logging.getLogger(__name__)

ROUTES: web.AppKey[Sequence[Route]] = web.AppKey("routes", Sequence)
"""Those without a dialect's prefix."""
REFUSE: web.AppKey[Refuse] = web.AppKey("refuse", Callable)  # type: ignore[arg-type]
"""Answers what isn't HTTP."""

_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_SAGEMAKER_ID = "X-Amzn-SageMaker-Inference-Id"
_CLIENT_CLOSED = 499
_MAX_LOGGED_ERROR = 300
_HTTP_ERRORS = {
    404: "ResourceNotFoundException",
    405: "MethodNotAllowedException",
    413: "PayloadTooLargeException",
}


def build_app(models: ModelRegistry, *, is_management: bool = False) -> web.Application:
    """An application that serves ``models``; ``is_management``: their management alone, on the
    address that is configured for it."""
    options = models.options
    table = DialectTable(DIALECTS, options.api)
    access = Access(
        options.api_keys,
        options.cors_origins,
        methods=options.cors_methods,
        headers=options.cors_headers,
        admin_key=options.admin_key,
        open_management=options.open_management,
        limits=options.tenant_limits,
        shares_prefix_cache=options.shares_prefix_cache,
    )
    choice = ModelChoice(models)
    app = web.Application(
        middlewares=[_front(models, table, access), *([page_at_root] if options.ui else [])],
    )
    app.on_response_prepare.append(_common_headers(models, table, access))
    has_management = is_management or (options.management is None and may_manage(options))

    def is_here(route: Route) -> bool:
        return has_management if route.is_management else not is_management

    if options.batch is not None and not is_management:
        _add_batches(app, models, options.batch, access)
    app[MODELS] = models
    app[TABLE] = table
    app[ROUTES] = [route for route in table.routes() if is_here(route)]
    app[REFUSE] = _refuser(models, table)
    expect = _expectations(models, table)
    for page in UI_ROUTES if options.ui and not is_management else ():
        handler = access.guard(page, handler_of(page, table.main, models, choice))
        app.router.add_route(page.method, page.path, handler, expect_handler=expect)
    for route in (*table.routes(), *table.prefixed_routes()):
        if is_here(route):
            handler = handler_of(route, table.of(route.path), models, choice)
            handler = access.guard(route, handler)
            handler = audited(handler) if route.is_management else handler
        elif route.is_management:
            handler = _elsewhere(options)
        else:
            continue
        methods = ("GET", "HEAD") if route.method == "GET" else (route.method,)
        for method in methods:
            app.router.add_route(method, route.path, handler, expect_handler=expect)
    return app


def _add_batches(
    app: web.Application, models: ModelRegistry, config: BatchConfig, access: Access
) -> None:
    """Work on batches from the first listening to the last."""
    batches = app[BATCHES] = BatchRunner(models, config, access.owned)

    async def start(_: web.Application) -> None:
        batches.start()

    async def stop(_: web.Application) -> None:
        await batches.stop()

    app.on_startup.append(start)
    app.on_shutdown.append(stop)


def _elsewhere(options: ServerOptions) -> Handler:
    """Says of a management route why it isn't here."""
    if options.management is not None and may_manage(options):
        where = "at the server's management_address"
    else:
        where = (
            "only on the loopback interface (--host 127.0.0.1) or with an admin key "
            "(--admin-key, SERVING_ADMIN_KEY); open_management lets everybody manage"
        )

    async def refuse(request: web.Request) -> web.StreamResponse:
        message = f"{request.method} {request.path} is a management route, which this server has "
        raise HttpError(404, _HTTP_ERRORS[404], message + where)

    return refuse


def may_manage(options: ServerOptions) -> bool:
    """Whether there are management routes: not without a key where other machines reach them,
    unless they may."""
    host = options.host if options.management is None else options.management.host
    return options.admin_key is not None or options.open_management or is_loopback(host)


def _chosen(models: ModelRegistry, request: web.Request | None) -> LoadedModel | None:
    """The model of a request, or the only one."""
    model = request.get(MODEL) if request is not None else None
    model = model or models.sole
    return None if model is None else model.loaded


def _error_reply(
    dialect: Dialect, error: Exception, models: ModelRegistry, request: web.Request | None = None
) -> web.Response:
    """In the dialect's form, which may have a choice of the model's own."""
    model = _chosen(models, request)
    return response_of(dialect.error(error, models.options if model is None else model.options))


def _front(models: ModelRegistry, table: DialectTable, access: Access) -> Middleware:
    """The outermost layer: identify and time the request, render errors, log one line."""
    id_header = models.options.request_id_header
    refusals = RefusalLog()

    @web.middleware
    async def front(request: web.Request, handler: Handler) -> web.StreamResponse:
        connection = request.protocol
        if isinstance(connection, Connection):
            connection.request_arrived()
        meter = request[METER] = RequestMeter(_request_id(request, id_header))
        CLIENT.set(request.remote)
        status = _CLIENT_CLOSED
        try:
            preflight = None
            if request.method == "OPTIONS":
                for_any = _is_for_any_origin(models, table, request)
                preflight = access.preflight(request, for_any=for_any)
            response = preflight or await handler(request)
            status = response.status
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception as error:
            models.error_rates.count(error)
            explained = _explain(error, request, meter.request_id)
            meter.error = str(explained)
            response = _error_reply(table.of(request.path), explained, models, request)
            status = response.status
            meter.is_refused = isinstance(error, CapacityError)
        finally:
            if isinstance(connection, Connection):
                connection.request_finished()
            if meter.is_refused and not refusals.has_line():
                models.metrics.count_answer(status, meter.seconds)
            else:
                _finish(models.metrics, request.method, request.path, meter, status, refusals)
            if models.tracer is not None:
                trace = request.headers.get("traceparent", "")
                models.tracer.note(meter, request.path, status, trace)
            if (said := request.get(SAID)) is not None:
                request_id, by = meter.request_id, access.managers
                log_call(request, said, request_id=request_id, status=status, by=by)
        return response

    return front


def _refuser(models: ModelRegistry, table: DialectTable) -> Refuse:
    """Answers what the HTTP library can't parse, of which there is no request."""

    def refuse(path: str, error: HttpError) -> web.Response:
        meter = RequestMeter(_new_id())
        meter.error = str(error)
        dialect = table.of(path) if path else table.main
        response = _error_reply(dialect, error, models)
        response.headers.update({**dialect.headers, "Server": SERVER})
        response.headers[models.options.request_id_header] = meter.request_id
        response.force_close()
        _finish(models.metrics, "-", path, meter, response.status)
        return response

    return refuse


def _expectations(
    models: ModelRegistry, table: DialectTable
) -> Callable[[web.Request], Awaitable[web.StreamResponse | None]]:
    """What is done about ``Expect``: a body that will be refused is not asked for."""

    async def expect(request: web.Request) -> web.StreamResponse | None:
        expected = request.headers.get("Expect", "")
        if expected.lower() != "100-continue":
            kind, message = "ExpectationFailedException", f"Expect: {expected[:80]} is not known"
            error = HttpError(417, kind, message, close=True)
            return _error_reply(table.of(request.path), error, models)
        if (request.content_length or 0) <= models.options.max_request_bytes:
            with suppress(ConnectionError):  # reading the body will notice
                await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0
        return None

    return expect


def _finish(
    metrics: Metrics,
    method: str,
    path: str,
    meter: RequestMeter,
    status: int,
    refusals: RefusalLog | None = None,
) -> None:
    seconds = meter.seconds
    metrics.count_answer(status, seconds)
    failure: dict[str, object] = {}
    if meter.error:
        failure["error"] = meter.error[:_MAX_LOGGED_ERROR]
    if refusals is not None and meter.is_refused:
        failure |= refusals.silent()
    log_access(
        id=meter.request_id,
        method=method,
        path=path,
        status=status,
        ms=round(seconds * 1000, 1),
        prompt_tokens=meter.num_prompt_tokens,
        generated_tokens=meter.num_generated_tokens,
        **failure,
    )


def _request_id(request: web.Request, header: str) -> str:
    """The client's own id, or SageMaker's, when it is a plain one: it can be found in logs."""
    for name in (header, _SAGEMAKER_ID):
        given = request.headers.get(name, "")
        if given and _REQUEST_ID.fullmatch(given):
            return given
    return _new_id()


def _new_id() -> str:
    """A random UUID (RFC 9562, version 4), in a quarter of the time that ``uuid`` takes; nothing
    relies on nobody guessing it."""
    digits = f"{random.getrandbits(128):032x}"
    variant = "89ab"[int(digits[16], 16) & 3]
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"


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


def _is_for_any_origin(models: ModelRegistry, table: DialectTable, request: web.Request) -> bool:
    """Whether pages of any site may make this call, unless origins are configured."""
    if "Origin" not in request.headers:
        return False
    method = request.headers.get("Access-Control-Request-Method", request.method)
    dialect = table.of(request.path)
    if method != "POST" or dialect is not table.main or not dialect.has_open_calls:
        return False
    model = _chosen(models, request)
    return model is None or not isinstance(model.backend, CustomCodeBackend)


def _common_headers(
    models: ModelRegistry, table: DialectTable, access: Access
) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    async def add(request: web.Request, response: web.StreamResponse) -> None:
        meter = request.get(METER)
        headers = response.headers
        origin = request.headers.get("Origin")
        if isinstance(response, Refused) and meter is not None and origin is None:
            headers[models.options.request_id_header] = meter.request_id
            return
        for name, value in table.of(request.path).headers.items():
            headers.setdefault(name, value)
        headers["Server"] = SERVER
        if origin is not None:
            for_any = _is_for_any_origin(models, table, request)
            headers.update(access.cors_headers(origin, for_any=for_any))
        loaded = request[MODEL].loaded if MODEL in request else None
        if loaded is not None and response.status == 200 and request.method == "POST":
            headers.update(load_report(request.headers, loaded.backend))
        if meter is not None:
            headers[models.options.request_id_header] = meter.request_id
        if ignored := request.get(IGNORED):
            headers.setdefault(IGNORED_HEADER, ", ".join(dict.fromkeys(ignored)))
        if response.keep_alive is not False:
            headers["Connection"] = "keep-alive"

    return add
