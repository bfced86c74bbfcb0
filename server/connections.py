"""Deadlines of connections: one that sends no complete request head in time is closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web
from aiohttp.web_protocol import RequestHandler


class ConnectionWatch:
    """Gives each new connection a deadline for its first request's headers.

    Afterwards the keep-alive timeout of the HTTP server takes over.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._deadlines: dict[asyncio.BaseProtocol, asyncio.TimerHandle] = {}

    def factory(self, server: web.Server) -> Callable[[], asyncio.Protocol]:
        """A protocol factory for ``loop.create_server``."""

        def accept() -> asyncio.Protocol:
            connection = server()
            loop = asyncio.get_running_loop()
            self._deadlines[connection] = loop.call_later(self._timeout_s, self._expire, connection)
            return connection

        return accept

    def request_arrived(self, connection: asyncio.BaseProtocol) -> None:
        deadline = self._deadlines.pop(connection, None)
        if deadline is not None:
            deadline.cancel()

    def close(self) -> None:
        for deadline in self._deadlines.values():
            deadline.cancel()
        self._deadlines.clear()

    def _expire(self, connection: RequestHandler) -> None:
        self._deadlines.pop(connection, None)
        connection.force_close()
