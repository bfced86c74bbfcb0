"""A load client's end of one streamed request: it counts tokens as they come, and nothing else."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lmi_core.errors import LmiError
from lmi_core.http_url import HttpUrl, key_header


class Timing(NamedTuple):
    """One request, in seconds from the submission of the batch it came with."""

    first_s: float
    last_s: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Api:
    """How a server is asked for a stream."""

    path: str
    body: Callable[[str, int], dict[str, Any]]
    """Of a prompt and a number of new tokens, which are made whatever they are."""
    marker: re.Pattern[bytes]
    """Stands once in every frame that carries a token, of at most 16 bytes."""
    ready_path: str
    counts_usage: bool = False
    """The last frame says how many tokens there were: frames may carry several."""


def _lmi_body(text: str, num_new: int) -> dict[str, Any]:
    parameters = {"max_new_tokens": num_new, "ignore_eos_token": True, "do_sample": False}
    return {"inputs": text, "parameters": parameters, "stream": True}


def _tgi_body(text: str, num_new: int) -> dict[str, Any]:
    return {"inputs": text, "parameters": {"max_new_tokens": num_new, "do_sample": False}}


_OPENAI = {
    "model": "model",
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}


def _completions_body(text: str, num_new: int) -> dict[str, Any]:
    return {**_OPENAI, "prompt": text, "max_tokens": num_new}


def _chat_body(text: str, num_new: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {**_OPENAI, "messages": messages, "max_tokens": num_new}


LMI = Api("/invocations", _lmi_body, re.compile(rb'{"token"'), "/ping")
TGI = Api("/generate_stream", _tgi_body, re.compile(rb'"token": ?{'), "/health")
_CHOICE = re.compile(rb'"choices": ?\[{')
"""Not of the last frame, which has the usage and no choice: it would be an interval of nothing."""
COMPLETIONS = Api("/v1/completions", _completions_body, _CHOICE, "/health", counts_usage=True)
CHAT = Api("/v1/chat/completions", _chat_body, _CHOICE, "/health", counts_usage=True)
APIS = {"lmi": LMI, "tgi": TGI, "openai": COMPLETIONS, "chat": CHAT}


_MAX_MARKER_BYTES = 16
_READ_BYTES = 16 << 10


class RefusedError(LmiError):
    """A server answered with another status than 200."""

    def __init__(self, status: int, text: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"answered {status}: {text}")
        self.status = status
        self.retry_after_s = retry_after_s
        """What it said of when to come again."""


@dataclass(slots=True)
class Answer:
    """A request's stream; times are ``time.perf_counter``'s."""

    sent_at: float
    """When its connection was there: other clients keep theirs, and count from there as well."""
    first_at: float = 0.0
    """0: no token came."""
    last_at: float = 0.0
    num_tokens: int = 0
    num_prompt_tokens: int | None = None
    """None: the server doesn't say."""
    intervals_s: list[float] = field(default_factory=list)
    """Between tokens; those of one frame share its interval."""
    was_aborted: bool = False


async def ask(
    url: HttpUrl, api: Api, body: dict[str, Any], *, abort_after: int | None = None
) -> Answer:
    """Send a request on a connection of its own and read its stream to the end, or, of
    ``abort_after`` tokens, cut it off.

    Raises RefusedError, OSError, or ValueError for a stream that ends otherwise than it should.
    """
    data = json.dumps(body).encode()
    request = head("POST", url, api.path, len(data)) + data
    loop = asyncio.get_running_loop()
    transport, reader = await loop.create_connection(
        lambda: _TokenReader(api, request, Answer(0.0), abort_after),
        url.host,
        url.port,
        ssl=True if url.is_https else None,
    )
    try:
        return await reader.done
    finally:
        transport.close()


async def is_ready(url: HttpUrl, api: Api) -> bool:
    """Whether the server answers its health check."""
    try:
        reader, writer = await asyncio.open_connection(
            url.host, url.port, ssl=True if url.is_https else None
        )
    except OSError:
        return False
    try:
        writer.write(head("GET", url, api.ready_path))
        status = await reader.readuntil(b"\r\n")
        return status.split()[1] == b"200"
    except (OSError, asyncio.IncompleteReadError):
        return False
    finally:
        writer.close()


def head(method: str, url: HttpUrl, path: str, num_bytes: int = 0) -> bytes:
    """A request's head; the key is that of ``OPENAI_API_KEY`` where there is one."""
    authorization = "".join(f"{name}: {value}\r\n" for name, value in key_header().items())
    return (
        f"{method} {url.path}{path} HTTP/1.1\r\nHost: {url.host}:{url.port}\r\n"
        f"Connection: close\r\n{authorization}"
        f"Content-Type: application/json\r\nContent-Length: {num_bytes}\r\n\r\n"
    ).encode()


class _TokenReader(asyncio.BufferedProtocol):
    """Sends a request and counts the frames of its answer as they come. Servers share the machine
    with this, so it does no more than that, and reads into memory of its own: asyncio would have
    256 KiB laid out for every read, which costs more than all else here."""

    def __init__(self, api: Api, request: bytes, answer: Answer, abort_after: int | None) -> None:
        self.done: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._api = api
        self._request = request
        self._answer = answer
        self._abort_after = abort_after
        self._buffer = bytearray(_READ_BYTES)
        self._transport: asyncio.Transport | None = None
        self._head: bytes | None = b""
        """What has come of the head; None once it is complete."""
        self._status = 0
        self._retry_after_s: float | None = None
        self._rest = b""
        """The end of what has come, which may be the beginning of a marker."""
        self._tail = b""
        """The last chunks, with the usage; of a refusal all of it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._answer.sent_at = time.perf_counter()
        transport.write(self._request)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._take(bytes(memoryview(self._buffer)[:nbytes]))

    def _take(self, data: bytes) -> None:
        if self._head is not None:
            self._head, separator, data = (self._head + data).partition(b"\r\n\r\n")
            if not separator:
                return
            self._status = int(self._head.split()[1])
            if (wait := re.search(rb"(?i)\r\nretry-after: *(\d+)", self._head)) is not None:
                self._retry_after_s = float(wait[1])
            self._head = None
        unread, num_new, end = self._rest + data, 0, 0
        for match in self._api.marker.finditer(unread):
            num_new, end = num_new + 1, match.end()
        self._rest = unread[end:][-_MAX_MARKER_BYTES:]
        self._tail = self._tail[-1000:] + data[-2000:]
        if num_new and self._status == 200:
            self._count(num_new)

    def _count(self, num_new: int) -> None:
        answer, now = self._answer, time.perf_counter()
        if answer.num_tokens:
            answer.intervals_s += [(now - answer.last_at) / num_new] * num_new
        else:
            answer.first_at = now
        answer.last_at = now
        answer.num_tokens += num_new
        if self._abort_after is not None and answer.num_tokens >= self._abort_after:
            answer.was_aborted = True
            assert self._transport is not None
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if self.done.done():
            return
        problem = None if self._answer.was_aborted else self._problem(error)
        if problem is not None:
            self.done.set_exception(problem)
        else:
            self.done.set_result(self._answer)

    def _problem(self, error: Exception | None) -> Exception | None:
        if error is not None or self._head is not None:
            return error or ConnectionError("closed before it answered")
        if self._status != 200:
            text = self._tail.decode(errors="replace")[:300]
            return RefusedError(self._status, text, self._retry_after_s)
        if b'"error"' in self._tail:
            return ValueError(f"the stream ended with an error: {self._tail[-300:]!r}")
        if not self._api.counts_usage:
            return None
        counts = re.findall(rb'"completion_tokens":\s*(\d+)', self._tail)
        prompts = re.findall(rb'"prompt_tokens":\s*(\d+)', self._tail)
        if not counts:
            return ValueError(f"the stream ended without usage: {self._tail[-200:]!r}")
        self._answer.num_tokens = int(counts[-1])
        self._answer.num_prompt_tokens = int(prompts[-1]) if prompts else None
        return None
