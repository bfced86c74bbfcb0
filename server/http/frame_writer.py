"""The way of a streamed answer's frames to its client."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Self

from aiohttp import web


class FrameWriter:
    """Writes the frames of a response, drops the connection of a client that takes none for too
    long, and sends ``heartbeat`` whenever a stream has been silent for a while, so that proxies
    keep it.

    Timers per response instead of one per write, which would cost more than the write's frame.
    """

    INTERVAL_S = 15.0

    def __init__(
        self,
        request: web.Request,
        response: web.StreamResponse,
        timeout_s: float,
        heartbeat: bytes = b"",
    ) -> None:
        """``response`` is prepared; ``heartbeat``: empty: none is sent."""
        transport = request.transport
        self._transport = transport if isinstance(transport, asyncio.WriteTransport) else None
        self._response = response
        self._is_chunked = response.headers.get("Transfer-Encoding") == "chunked"
        self._timeout_s = timeout_s
        self._heartbeat = heartbeat
        self._loop = asyncio.get_running_loop()
        self._blocked_since: float | None = None
        self._last_sent = self._loop.time()
        self._beat: asyncio.TimerHandle | None = None
        self._beating: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        self._timer = self._loop.call_later(self._timeout_s, self._check)
        if self._heartbeat:
            self._beat = self._loop.call_later(self.INTERVAL_S, self._keep_alive)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for pending in (self._timer, self._beat, self._beating):
            if pending is not None:
                pending.cancel()

    async def send(self, frame: bytes) -> None:
        """Return when the client has taken so much that there is room for more; an empty frame is
        nothing to send."""
        if frame:
            self._last_sent = self._blocked_since = self._loop.time()
            await self._response.write(frame)
            self._blocked_since = None

    def is_clear(self) -> bool:
        """Whether ``push`` may be called behind what was sent: the client has taken all of it, and
        hasn't left."""
        transport = self._transport
        if transport is None or not self._is_chunked or transport.is_closing():
            return False
        return not transport.get_write_buffer_size()

    def push(self, frame: bytes) -> None:
        """As ``send``, at once, by a chunk of the response's body."""
        assert self._transport is not None
        self._last_sent = self._loop.time()
        self._transport.write(b"%x\r\n%b\r\n" % (len(frame), frame))

    def _check(self) -> None:
        now = self._loop.time()
        due = (now if self._blocked_since is None else self._blocked_since) + self._timeout_s
        if due > now:
            self._timer = self._loop.call_at(due, self._check)
        elif self._transport is not None:
            # The connection's end cancels the handler, and with it the request.
            self._transport.abort()

    def _keep_alive(self) -> None:
        now = self._loop.time()
        due = self._last_sent + self.INTERVAL_S
        if due <= now:
            due = now + self.INTERVAL_S
            if self._blocked_since is None:
                self._beating = self._loop.create_task(self._send_heartbeat())
        self._beat = self._loop.call_at(due, self._keep_alive)

    async def _send_heartbeat(self) -> None:
        with suppress(ConnectionError):  # the handler itself will notice
            await self.send(self._heartbeat)
