"""Early refusal: how many requests are inside, and how large a body may be."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aiohttp import StreamReader, web

from lmi_core.errors import CapacityError
from lmi_server.dialects.base import HttpError

_PIECE_BYTES = 1 << 20
_BODY = web.RequestKey("body", bytes)
"""Read once, whoever asks for it."""


class Pace:
    """After how long there may be room for a caller that is refused now.

    Callers that come back too early cost a refusal each, them and the server: the time grows until
    a quarter as many are refused as requests end, which is looked at as often as it has passed. It
    doubles or halves at most in a time of its own length: a burst sends nobody away for long.
    """

    _MIN_S, _MAX_S = 1.0, 30.0
    _REFUSALS_PER_END = 0.25

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since_s = clock()
        self._num_refused = self._num_ended = 0
        self._wait_s = self._MIN_S

    def note_end(self) -> None:
        """A request has ended."""
        self._num_ended += 1

    def refuse(self) -> float:
        """Seconds, a whole number, for one more that is refused; not the same for all, who
        would come together."""
        self._num_refused += 1
        now_s = self._clock()
        num_waits = (now_s - self._since_s) / self._wait_s
        if num_waits >= 1:
            wanted = self._REFUSALS_PER_END * max(1, self._num_ended)
            factor = min(2.0, max(0.5**num_waits, self._num_refused / wanted))
            self._wait_s = min(self._MAX_S, max(self._MIN_S, self._wait_s * factor))
            self._num_refused = self._num_ended = 0
            self._since_s = now_s
        return float(round(max(self._MIN_S, self._wait_s * random.uniform(0.8, 1.2))))


class Admission:
    """Counts requests from the end of their headers to the end of their answers."""

    def __init__(self, *, max_in_flight: int, max_request_bytes: int, receive_timeout_s: float):
        self._max_in_flight = max_in_flight
        self._max_request_bytes = max_request_bytes
        self._receive_timeout_s = receive_timeout_s
        self.num_in_flight = 0
        self.draining = False
        self._pace = Pace()
        self._became_idle = asyncio.Event()

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Hold a place; CapacityError when there is none, 503 while the server stops."""
        if self.draining:
            raise HttpError(503, "WlmException", "Worker shutting down", close=True)
        if (error := self.refusal()) is not None:
            raise error
        self.num_in_flight += 1
        try:
            yield
        finally:
            self.num_in_flight -= 1
            self._pace.note_end()
            if not self.num_in_flight:
                self._became_idle.set()

    def refusal(self) -> CapacityError | None:
        """Why there is no place; None: there is one, or the server stops."""
        wait_s = self.wait_if_full()
        return None if wait_s is None else full(self.num_in_flight, wait_s)

    def wait_if_full(self) -> float | None:
        """Seconds after which there may be a place; None: there is one, or the server stops."""
        if self.num_in_flight < self._max_in_flight or self.draining:
            return None
        return self._pace.refuse()

    async def idle(self) -> None:
        """Return once no request is inside."""
        while self.num_in_flight:
            self._became_idle.clear()
            await self._became_idle.wait()

    async def read_body(self, request: web.Request, most_bytes: int | None = None) -> bytes:
        """The whole body; HttpError 413 when it is longer than the server takes, or than
        ``most_bytes``, 408 when it takes too long, 400 when it can't be decompressed or its chunks
        are malformed."""
        most_bytes = min(self._max_request_bytes, most_bytes or self._max_request_bytes)
        if (request.content_length or 0) > most_bytes:
            raise _too_large(most_bytes)
        try:
            async with asyncio.timeout(self._receive_timeout_s):
                if _BODY not in request:
                    request[_BODY] = await self._received(request.content, most_bytes)
                return request[_BODY]
        except web.RequestPayloadError:
            raise _undecodable(request.headers.get("Content-Encoding", "")) from None
        except TimeoutError:
            raise HttpError(
                408,
                "RequestTimeoutException",
                f"The body did not arrive within {self._receive_timeout_s:g} s",
                close=True,
            ) from None

    async def _received(self, content: StreamReader, most_bytes: int) -> bytes:
        """All of it, in pieces that take little time each; joining them leaves others the lock."""
        pieces: list[bytes] = []
        last, num_bytes = bytearray(), 0
        async for chunk in content.iter_any():
            num_bytes += len(chunk)
            if num_bytes > most_bytes:
                raise _too_large(most_bytes)
            last += chunk
            if len(last) >= _PIECE_BYTES:
                pieces.append(bytes(last))
                last.clear()
        if not pieces:
            return bytes(last)
        pieces.append(bytes(last))
        return await asyncio.to_thread(b"".join, pieces)


def full(num_in_flight: int, wait_s: float) -> CapacityError:
    """What those are told for whom there is no place."""
    return CapacityError(
        f"{num_in_flight} requests are being served, which is the limit", retry_after_s=wait_s
    )


def _too_large(most_bytes: int) -> HttpError:
    return HttpError(
        413,
        "PayloadTooLargeException",
        f"The body is longer than {most_bytes} bytes",
        close=True,
    )


def _undecodable(encoding: str) -> HttpError:
    message = "The body's chunks are malformed; send it with Content-Length, or in valid chunks"
    if encoding:
        message = (
            f"The body does not decode as its Content-Encoding says ({encoding[:40]}); "
            "send it as it is, or compressed by gzip or deflate"
        )
    return HttpError(400, "BadRequestException", message, close=True)
