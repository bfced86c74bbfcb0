"""Accepts a listener's connections; where no descriptor is left, it stops for a while.

asyncio's own server tries again for every place of its backlog, and logs each failure.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

log = logging.getLogger(__name__)

_PER_TURN = 64
"""Connections accepted before others on the loop have their turn."""
_PAUSE_S = 1.0
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """Between ``start`` and ``close`` each connection gets a protocol of ``make_protocol``.

    ``tls``: speaks https, with handshakes that end within ``handshake_timeout_s``; None: http.
    """

    def __init__(
        self,
        bound: socket.socket,
        make_protocol: Callable[[], asyncio.BaseProtocol],
        *,
        tls: ssl.SSLContext | None,
        handshake_timeout_s: float,
    ) -> None:
        self._bound = bound
        self._make_protocol = make_protocol
        self._tls = tls
        self._handshake_timeout_s = handshake_timeout_s if tls is not None else None
        self._loop = asyncio.get_running_loop()
        self._resume: asyncio.TimerHandle | None = None
        self._connecting: set[asyncio.Task[None]] = set()

    def start(self, backlog: int) -> None:
        """OSError where the socket can't listen."""
        self._bound.listen(backlog)
        self._bound.setblocking(False)
        self._loop.add_reader(self._bound, self._accept)

    def close(self) -> None:
        """Accept nothing more. Idempotent."""
        if self._resume is not None:
            self._resume.cancel()
        if self._bound.fileno() != -1:
            self._loop.remove_reader(self._bound)
            self._bound.close()

    async def cleanup(self) -> None:
        """End the handshakes that are under way."""
        self.close()
        for task in self._connecting:
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)

    def _accept(self) -> None:
        for _ in range(_PER_TURN):
            try:
                connection, _address = self._bound.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._pause(error)
                    return
                continue  # That client has left already.
            connection.setblocking(False)
            task = self._loop.create_task(self._connect(connection))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    def _pause(self, error: OSError) -> None:
        log.error(
            "no connection is accepted for %g s: %s (ulimit -n sets the number of descriptors)",
            _PAUSE_S,
            error.strerror,
        )
        self._loop.remove_reader(self._bound)
        self._resume = self._loop.call_later(
            _PAUSE_S, self._loop.add_reader, self._bound, self._accept
        )

    async def _connect(self, connection: socket.socket) -> None:
        # What fails is the client's handshake, or its connection.
        with suppress(OSError):
            await self._loop.connect_accepted_socket(
                self._make_protocol,
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=self._handshake_timeout_s,
            )
