"""The load client: a wave of streamed requests sent at once, the same for every server."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.peers.work import Timing

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Api:
    """How a server is asked for a stream."""

    path: str
    body: Callable[[str, int], dict[str, Any]]
    marker: bytes
    """Stands once in every frame that carries a token."""
    ready_path: str
    counts_usage: bool = False
    """The last frame says how many tokens there were: frames may carry several."""


def _lmi_body(text: str, num_new: int) -> dict[str, Any]:
    parameters = {"max_new_tokens": num_new, "ignore_eos_token": True, "do_sample": False}
    return {"inputs": text, "parameters": parameters, "stream": True}


def _completions_body(text: str, num_new: int) -> dict[str, Any]:
    return {
        "model": "model",
        "prompt": text,
        "max_tokens": num_new,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


LMI = Api("/invocations", _lmi_body, b'{"token"', "/ping")
COMPLETIONS = Api("/v1/completions", _completions_body, b"data: {", "/health", counts_usage=True)


async def wave(
    port: int, api: Api, texts: Sequence[str], num_new: int, timeout_s: float
) -> list[Timing]:
    """Timings of the requests, from the moment before the first connection was opened.

    Raises OSError, TimeoutError, or ValueError when a server answers otherwise than asked.
    """
    start = time.perf_counter()
    requests = (_stream(port, api, api.body(text, num_new), start) for text in texts)
    async with asyncio.timeout(timeout_s):
        return list(await asyncio.gather(*requests))


async def is_ready(port: int, api: Api) -> bool:
    try:
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(_head("GET", api.ready_path))
        status = await reader.readuntil(b"\r\n")
        writer.close()
        return status.split()[1] == b"200"
    except (OSError, asyncio.IncompleteReadError):
        return False


async def _stream(port: int, api: Api, body: dict[str, Any], start: float) -> Timing:
    data = json.dumps(body).encode()
    request = _head("POST", api.path, len(data)) + data
    loop = asyncio.get_running_loop()
    transport, reader = await loop.create_connection(
        lambda: _TokenReader(api, request, start), HOST, port
    )
    try:
        return await reader.timing
    finally:
        transport.close()


class _TokenReader(asyncio.Protocol):
    """Sends a request and counts the frames of its answer as they come. Both sides of a pair share
    the machine with this, so it does no more than that."""

    def __init__(self, api: Api, request: bytes, start: float) -> None:
        self.timing: asyncio.Future[Timing] = asyncio.get_running_loop().create_future()
        self._api = api
        self._request = request
        self._start = start
        self._first_s = self._last_s = 0.0
        self._num_frames = 0
        self._head: bytes | None = b""
        """What has come of the head; None once it is complete."""
        self._rest = b""
        """The end of what has come, which may be the beginning of a marker."""
        self._tail = b""
        """The last chunks, with the usage."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self._head is not None:
            self._head, separator, data = (self._head + data).partition(b"\r\n\r\n")
            if not separator:
                return
            if self._head.split()[1] != b"200":
                status_line = self._head.split(b"\r\n")[0]
                self._fail(ValueError(f"{self._api.path} answered {status_line!r}"))
            self._head = None
        num_new = (self._rest + data).count(self._api.marker)
        self._rest = data[-len(self._api.marker) + 1 :]
        self._tail = self._tail[-1000:] + data[-2000:]
        if num_new:
            self._last_s = time.perf_counter() - self._start
            self._first_s = self._first_s or self._last_s
            self._num_frames += num_new

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None or self._head is not None:
            return self._fail(error or ConnectionError("closed before it answered"))
        if self.timing.done():
            return
        try:
            count = _usage(self._tail) if self._api.counts_usage else self._num_frames
        except ValueError as missing:
            return self._fail(missing)
        self.timing.set_result(Timing(self._first_s, self._last_s, count))

    def _fail(self, error: Exception) -> None:
        if not self.timing.done():
            self.timing.set_exception(error)


def _usage(tail: bytes) -> int:
    counts = re.findall(rb'"completion_tokens":\s*(\d+)', tail)
    if not counts:
        raise ValueError(f"the stream ended without usage: {tail[-200:]!r}")
    return int(counts[-1])


def _head(method: str, path: str, num_bytes: int = 0) -> bytes:
    return (
        f"{method} {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {num_bytes}\r\n\r\n"
    ).encode()
