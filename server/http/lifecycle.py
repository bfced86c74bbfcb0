"""A server's life: bind, load, listen, serve until a signal, drain, leave."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import gc
import logging
import os
import resource
import signal
import socket
import ssl
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import NoReturn

from aiohttp import web

from lmi_core.errors import UserError
from lmi_core.weights.repack_cache import discard_partial_files
from lmi_server.dialects.routes import Route
from lmi_server.http.acceptor import Acceptor
from lmi_server.http.app import REFUSE, ROUTES, build_app, may_manage
from lmi_server.http.banner import banner, reachable_url, route_list, scope_of
from lmi_server.http.connections import Connection
from lmi_server.http.options import ServerOptions
from lmi_server.http.readiness import notify
from lmi_server.models.model_registry import ModelRegistry

log = logging.getLogger(__name__)

_BACKLOG = 4096
_CANCEL_TIMEOUT_S = 0.5
# How long a body that was refused is still read, so that the client gets to see the answer.
_LINGERING_S = 1.0
_FAILURE_SHOWN_S = 3.0
# Names of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE_BLOCK_BYTES = 4 << 20


async def run_server(models: ModelRegistry, *, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; a second signal cuts the draining short, and one while models
    are loaded ends the process: at once at the start, else once running requests have ended.

    The port is taken before any model loads, so that a busy one is reported at once, but nobody is
    listened to before all are ready, unless ``wait_for_models`` is off. Raises UserError when the
    port can't be had, and what a model's loading raises.
    """
    stop, options = _StopSignal(), models.options
    _raise_file_limit()
    give_back_large_blocks()
    gc.freeze()  # modules: no later collection looks at them again
    with bind_all(options) as sockets:
        async with models:
            server = HttpServer(models)
            if options.wait_for_models:
                await _load(models, stop)
            await server.start(*sockets)
            announce(_report(models, server.app[ROUTES], urls(options, sockets)))
            if options.wait_for_models:
                notify("READY=1")
            if options.api != "tgi" and not may_manage(options):
                log.info(
                    "management routes are off: beyond the loopback interface they need an "
                    "admin key (--admin-key)"
                )
            if not options.wait_for_models:
                await _load_while_serving(models, server, stop)
                notify("READY=1")
            await stop.requested.wait()
            notify("STOPPING=1")
            await server.stop(stop.urgent)
    log.info("stopped")
    if models.has_abandoned_loads:
        _exit(0)


def _report(models: ModelRegistry, routes: Sequence[Route], urls: Sequence[str]) -> str:
    options = models.options
    management_url = urls[1] if len(urls) > 1 else None
    text = banner(urls[0], list(models), management_url, scope=scope_of(options.host))
    if not options.verbose:
        return text
    return f"{text}\n{route_list(routes, urls[0], needs_key=bool(options.api_keys))}"


async def _load_while_serving(models: ModelRegistry, server: HttpServer, stop: _StopSignal) -> None:
    """A failure ends the server, a moment later so that one more health check can see it."""
    try:
        await _load(models, stop, partial(server.stop, stop.urgent))
    except Exception:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.requested.wait(), _FAILURE_SHOWN_S)
        await server.stop(stop.urgent)
        raise


async def _load(
    models: ModelRegistry, stop: _StopSignal, drain: Callable[[], Awaitable[None]] | None = None
) -> None:
    """Load the models of the start; a signal meanwhile ends the process, after ``drain``."""
    loading = asyncio.ensure_future(models.load_all())
    requested = asyncio.ensure_future(stop.requested.wait())
    try:
        await asyncio.wait((loading, requested), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            if drain is not None:
                await drain()
            await _abandon(loading, stop.number)
        await loading
    finally:
        requested.cancel()


async def _abandon(loading: asyncio.Future[None], number: int) -> NoReturn:
    """End the process with what a signal leaves, though threads may still load: nothing stops
    them."""
    log.info("stopping while a model is loaded")
    loading.cancel()
    await asyncio.wait((loading,), timeout=_CANCEL_TIMEOUT_S)
    _exit(128 + number)


def _exit(status: int) -> NoReturn:
    """End the process without waiting for its threads."""
    discard_partial_files()
    logging.shutdown()
    os._exit(status)


class HttpServer:
    """The application on a listening socket, and management on one of its own."""

    def __init__(self, models: ModelRegistry) -> None:
        self._models = models
        self._options = options = models.options
        self.app = build_app(models)
        self._listeners = [Listener(self.app, options, options.tls)]
        if options.management is not None and may_manage(options):
            management = build_app(models, is_management=True)
            self._listeners.append(Listener(management, options, options.management.tls))

    async def start(self, *sockets: socket.socket) -> None:
        """Accept connections on bound sockets, as ``bind_all`` gives them."""
        for listener, bound in zip(self._listeners, sockets, strict=True):
            try:
                await listener.start(bound)
            except BaseException:
                await self._cleanup()
                raise

    async def stop(self, urgent: asyncio.Event) -> None:
        """Accept nothing more, let running requests finish in time, cut off the rest.

        ``urgent`` ends the waiting early.
        """
        models = self._models
        models.start_draining()
        if models.num_in_flight:
            log.info("stopping: waiting for %d requests", models.num_in_flight)
        for listener in self._listeners:
            listener.close()
        await _first_of(models.idle(), urgent.wait(), timeout_s=self._options.drain_timeout_s)
        if models.num_in_flight:
            log.warning("%d requests did not finish and are cut off", models.num_in_flight)
        await self._cleanup()

    async def _cleanup(self) -> None:
        for listener in self._listeners:
            await listener.cleanup()


class Listener:
    """One application on one socket."""

    def __init__(
        self, app: web.Application, options: ServerOptions, tls: ssl.SSLContext | None
    ) -> None:
        self._app = app
        self._options = options
        self._tls = tls
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=_CANCEL_TIMEOUT_S,
        )
        self._acceptor: Acceptor | None = None

    async def start(self, bound: socket.socket) -> None:
        """Accept connections on a bound socket."""
        await self._runner.setup()
        assert self._runner.server is not None
        accept = partial(
            Connection,
            self._runner.server,
            refuse=self._app[REFUSE],
            head_timeout_s=self._options.receive_timeout_s,
            access_log=None,
            keepalive_timeout=self._options.keepalive_timeout_s,
            lingering_time=_LINGERING_S,
        )
        self._acceptor = Acceptor(
            bound, accept, tls=self._tls, handshake_timeout_s=self._options.receive_timeout_s
        )
        try:
            self._acceptor.start(_BACKLOG)
        except OSError as error:
            host, port = bound.getsockname()[:2]
            raise _port_error(host, port, error) from None

    def close(self) -> None:
        """Accept nothing more."""
        if self._acceptor is not None:
            self._acceptor.close()
        if self._runner.server is not None:
            self._runner.server.pre_shutdown()

    async def cleanup(self) -> None:
        """End every connection."""
        if self._acceptor is not None:
            await self._acceptor.cleanup()
        await self._runner.cleanup()


class _StopSignal:
    """``requested`` is set by the first signal, ``urgent`` by the second."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.urgent = asyncio.Event()
        self.number = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._receive, number)

    def _receive(self, number: int) -> None:
        self.number = number
        (self.urgent if self.requested.is_set() else self.requested).set()


async def _first_of(*waits: Coroutine[None, None, object], timeout_s: float) -> None:
    """Wait until one of them is done or the time is over."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _raise_file_limit() -> None:
    """A connection is a file; the usual soft limit of 1024 is for programs that use select."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Some systems refuse to go as high as they say.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def give_back_large_blocks() -> None:
    """Let glibc return what large bodies took to the system once it is freed. Left to itself, it
    keeps blocks of up to 32 MiB as soon as one of that size was freed."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2 * _LARGE_BLOCK_BYTES)


@contextlib.contextmanager
def bind_all(options: ServerOptions) -> Iterator[list[socket.socket]]:
    """A bound socket per address of the server, management's last; UserError as ``bind``."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(bind(options.host, options.port))]
        own = options.management
        if own is not None and may_manage(options):
            sockets.append(stack.enter_context(bind(own.host, own.port, "management_address")))
        yield sockets


def urls(options: ServerOptions, sockets: Sequence[socket.socket]) -> list[str]:
    """The URL of every address that ``bind_all`` gave a socket for."""
    addresses = [(options.host, options.tls)]
    if options.management is not None:
        addresses.append((options.management.host, options.management.tls))
    return [
        reachable_url(host, bound.getsockname()[1], is_https=tls is not None)
        for (host, tls), bound in zip(addresses, sockets, strict=False)
    ]


def bind(host: str, port: int, option: str = "--port") -> socket.socket:
    """A bound socket that doesn't listen yet; UserError says why the port can't be had."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setblocking(False)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except (OSError, OverflowError) as error:
        raise _port_error(host, port, error, option) from None
    return listener


def _port_error(host: str, port: int, error: Exception, option: str = "--port") -> UserError:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return UserError(
            f"Port {port} on {host} is in use; stop what listens there or choose another {option}",
            field="port",
        )
    return UserError(f"Can't listen on {host} port {port}: {error}", field="host")
