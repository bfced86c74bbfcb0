"""Connections: deadlines for request heads, and refusals of what isn't HTTP."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_protocol import RequestHandler

from lmi_server.dialects.base import HttpError

Refuse = Callable[[str, HttpError], web.Response]
"""The response to what isn't a request; the path is empty when not even that was understood."""

_REQUEST_LINE = re.compile(rb"[A-Z]{3,7} (/[!->@-~]{0,200})", re.ASCII)


class Connection(RequestHandler):
    """One client's connection.

    A head must be complete within ``head_timeout_s``: the first from the connection's start, later
    ones from their first byte. Between requests the keep-alive timeout of the HTTP library holds.
    """

    __slots__ = (
        "_body",
        "_deadline",
        "_head_timeout_s",
        "_in_request",
        "_is_resuming",
        "_path",
        "_refuse",
    )

    def __init__(
        self, server: web.Server, *, refuse: Refuse, head_timeout_s: float, **settings: Any
    ) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **settings)
        self._refuse = refuse
        self._head_timeout_s = head_timeout_s
        self._path = b""
        self._body: StreamReader | None = None
        """Of the last request whose head has come."""
        self._in_request = False
        self._is_resuming = False
        self._deadline: asyncio.TimerHandle | None = None
        self._await_head()

    def request_arrived(self) -> None:
        """A head is complete, and its request begins."""
        self._in_request = True
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def request_finished(self) -> None:
        self._in_request = False

    def data_received(self, data: bytes) -> None:
        line = _REQUEST_LINE.match(data)
        if line is not None:
            self._path = line[1]
        is_closing = self._close
        # The HTTP library would drop the rest of a body that it waits for.
        self._close = is_closing and (self._body is None or self._body.is_eof())
        super().data_received(data)
        self._close = is_closing
        if self._messages:
            self._body = self._messages[-1][1]
        has_head = self._in_request or self._messages
        if self._deadline is None and not has_head and not self._force_close:
            self._await_head()

    def close(self) -> None:
        """Take no further request: who waits for one is told at once."""
        waiter = self._waiter
        super().close()
        if waiter is not None and waiter.cancelled():
            self.force_close()

    async def start(self) -> None:
        if self._close and not self._messages:  # closed before it could wait for a request
            self.force_close()
        await super().start()

    def resume_reading(self, *args: Any, **options: Any) -> None:
        """What was held back follows in a later turn of the loop: a few received bytes can be many
        megabytes when decompressed, which their reader would go through in one turn."""
        if not self._reading_paused:
            super().resume_reading(*args, **options)
        elif not self._is_resuming:
            self._is_resuming = True
            asyncio.get_running_loop().call_soon(partial(self._resume, *args, **options))

    def _resume(self, *args: Any, **options: Any) -> None:
        self._is_resuming = False
        if self.transport is not None:
            super().resume_reading(*args, **options)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.request_arrived()
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What the HTTP library couldn't parse, in the form of the path's protocol."""
        if isinstance(exc, ConnectionError):  # the client has left: nothing went wrong here
            raise exc
        if status != 400:
            return super().handle_error(request, status, exc, message)
        self.request_arrived()
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun already")
        return self._refuse(self._path.decode("ascii"), _bad_request(exc, message))

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        # A body that nobody needed doesn't decode: its request has had its answer.
        if not isinstance(kwargs.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **kwargs)

    def _await_head(self) -> None:
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(self._head_timeout_s, self.force_close)


def _bad_request(exc: BaseException | None, message: str | None) -> HttpError:
    if isinstance(exc, LineTooLong):
        return HttpError(
            431,
            "RequestHeaderFieldsTooLargeException",
            "The request's head is too large: a line or a header is longer than 8190 bytes",
            close=True,
        )
    reason = (message or "").strip().partition("\n")[0].rstrip(":. ")
    return HttpError(
        400,
        "BadRequestException",
        "The request is not valid HTTP/1.1" + (f": {reason[:200]}" if reason else ""),
        close=True,
    )
