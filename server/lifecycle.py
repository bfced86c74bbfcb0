"""A server's life: bind, load, listen, serve until a signal, drain, leave."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from aiohttp import web

from lmi_core.errors import UserError
from lmi_server.admission import Admission
from lmi_server.app import ROUTES, SERVICE, build_app
from lmi_server.backend import Backend
from lmi_server.banner import banner
from lmi_server.connections import ConnectionWatch
from lmi_server.options import ServerOptions

log = logging.getLogger(__name__)

_BACKLOG = 4096
_CANCEL_TIMEOUT_S = 0.5
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


async def run_server(
    engine: AbstractAsyncContextManager[Backend],
    options: ServerOptions,
    *,
    announce: Callable[[str], None],
) -> None:
    """Serve until SIGTERM or SIGINT; a second signal cuts the draining short.

    The port is taken before the engine loads, so that a busy one is reported at once, but nobody
    is listened to before the model is ready. Raises UserError when the port can't be had.
    """
    stop = _StopSignal()
    with _bind(options.host, options.port) as listener:
        async with engine as backend:
            if not stop.requested.is_set():
                await _serve(backend, options, listener, stop, announce)
    log.info("stopped")


class _StopSignal:
    """``requested`` is set by the first signal, ``urgent`` by the second."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.urgent = asyncio.Event()
        for number in _SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._receive)

    def _receive(self) -> None:
        (self.urgent if self.requested.is_set() else self.requested).set()


async def _serve(
    backend: Backend,
    options: ServerOptions,
    listener: socket.socket,
    stop: _StopSignal,
    announce: Callable[[str], None],
) -> None:
    watch = ConnectionWatch(options.receive_timeout_s)
    app = build_app(backend, options, watch=watch)
    runner = web.AppRunner(
        app,
        access_log=None,
        handler_cancellation=True,
        keepalive_timeout=options.keepalive_timeout_s,
        shutdown_timeout=_CANCEL_TIMEOUT_S,
    )
    await runner.setup()
    assert runner.server is not None
    accept = watch.factory(runner.server)
    try:
        server = await asyncio.get_running_loop().create_server(
            accept, sock=listener, backlog=_BACKLOG
        )
    except OSError as error:
        await runner.cleanup()
        raise _port_error(options.host, options.port, error) from None
    announce(banner(app[ROUTES], options.host, listener.getsockname()[1]))
    await stop.requested.wait()
    admission = app[SERVICE].admission
    log.info("stopping: %d requests are running", admission.num_in_flight)
    admission.draining = True
    server.close()
    runner.server.pre_shutdown()
    await _drained(admission, stop, options.drain_timeout_s)
    watch.close()
    await runner.cleanup()


async def _drained(admission: Admission, stop: _StopSignal, timeout_s: float) -> None:
    """Wait until no request runs, the time is over or a second signal came."""
    waits = [
        asyncio.create_task(admission.idle()),
        asyncio.create_task(stop.urgent.wait()),
    ]
    _, pending = await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    if admission.num_in_flight:
        log.warning("%d requests did not finish and are cut off", admission.num_in_flight)


def _bind(host: str, port: int) -> socket.socket:
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
        raise _port_error(host, port, error) from None
    return listener


def _port_error(host: str, port: int, error: Exception) -> UserError:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return UserError(
            f"Port {port} on {host} is in use; stop what listens there or choose another --port",
            field="port",
        )
    return UserError(f"Can't listen on {host} port {port}: {error}", field="host")
