"""An application of Ray Serve, for those who have one: a server of lmi's in each replica.

    serve run lmi_core.ray:app model=/models/qwen num_cpus=4 max_replicas=4 max_model_len=4096

``num_cpus``, ``min_replicas``, ``max_replicas`` and ``target_ongoing_requests`` are Serve's;
``model`` is what ``lmi serve`` is started with, everything else one of its options. A replica that
is lost takes its streams along: ``lmi serve --on ray`` has copies whose requests go on elsewhere.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

from lmi_core.errors import EngineError, MissingExtraError, UserError
from lmi_core.settings.job import without_job

_MAX_ONGOING = 1000
"""Of a replica: the server in it has a queue of its own, and refuses what is too much."""
_TARGET_ONGOING = 16.0
_STOP_S = 60.0
_PIECE_BYTES = 1 << 16
_ADDRESS = re.compile(r"Listening on http://127\.0\.0\.1:(\d+)")
_OF_A_CONNECTION = frozenset(
    (b"connection", b"content-length", b"expect", b"keep-alive", b"te", b"transfer-encoding")
)

T = TypeVar("T")
Headers = list[tuple[bytes, bytes]]


class Answer(NamedTuple):
    """Of the server in a replica, as it comes."""

    status: int
    headers: Headers
    pieces: AsyncIterator[bytes]


class LocalServer:
    """``lmi serve`` as a child, on a port of the loopback interface."""

    def __init__(self, arguments: Iterable[str]) -> None:
        """Returns once it answers; raises EngineError where it ends before, as its log says."""
        command = [sys.executable, "-m", "lmi_core", "serve", *arguments]
        # Whatever has started Ray has not started this.
        self._process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", "0"],
            env=without_job(os.environ),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        found = _ADDRESS.match(self._process.stdout.readline())
        if found is None:
            raise EngineError(f"lmi serve ended with status {self.stop()}; its log says why")
        self.port = int(found[1])

    def check(self) -> None:
        """Raise EngineError if it has ended."""
        status = self._process.poll()
        if status is not None:
            raise EngineError(f"lmi serve ended with status {status}")

    def stop(self) -> int:
        """Let it finish its requests; its exit status."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            status = self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        return status

    async def ask(self, method: str, target: bytes, headers: Headers, body: bytes) -> Answer:
        """Pass a request on. HTTP/1.0, where an answer ends with its connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(_head(method, target, headers, len(body)) + body)
            await writer.drain()
            status = int((await reader.readline()).split(maxsplit=2)[1])
            given: Headers = []
            while line := (await reader.readline()).strip():
                name, _, value = line.partition(b":")
                given.append((name.lower(), value.strip()))
        except BaseException:
            writer.close()
            raise
        return Answer(status, _kept(given), _pieces(reader, writer))


def _head(method: str, target: bytes, headers: Headers, num_bytes: int) -> bytes:
    lines = [method.encode() + b" " + target + b" HTTP/1.0", *map(b": ".join, _kept(headers))]
    return b"\r\n".join((*lines, b"content-length: %d" % num_bytes, b"", b""))


def _kept(headers: Headers) -> Headers:
    return [(name, value) for name, value in headers if name.lower() not in _OF_A_CONNECTION]


async def _pieces(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> AsyncIterator[bytes]:
    try:
        while piece := await reader.read(_PIECE_BYTES):
            yield piece
    finally:
        writer.close()


def serve_arguments(arguments: Mapping[str, Any]) -> list[str]:
    """What ``lmi serve`` is started with, of what isn't Serve's."""
    options = {key: value for key, value in arguments.items() if key not in (*_SERVE, "model")}
    given = [part for key, value in options.items() for part in ("--option", f"{key}={value}")]
    model = arguments.get("model")
    return [*([] if model is None else [str(model)]), *given]


_SERVE = ("num_cpus", "min_replicas", "max_replicas", "target_ongoing_requests")


def _number(kind: Callable[[Any], T], arguments: Mapping[str, Any], name: str, default: T) -> T:
    """One of Serve's; the rest of its rules are Serve's to say. Raises UserError."""
    given = arguments.get(name, default)
    try:
        return kind(given)
    except (TypeError, ValueError):
        wanted = "a whole number" if kind is int else "a number"
        raise UserError(f"{name}={given!r} is not {wanted}", field=name) from None


def autoscaling(arguments: Mapping[str, Any]) -> dict[str, float]:
    """How Serve is to change the number of replicas. Raises UserError."""
    least = _number(int, arguments, "min_replicas", 1)
    most = _number(int, arguments, "max_replicas", least)
    if most < least:
        raise UserError(f"max_replicas={most} is below min_replicas={least}", field="max_replicas")
    target = _number(float, arguments, "target_ongoing_requests", _TARGET_ONGOING)
    return {"min_replicas": least, "max_replicas": most, "target_ongoing_requests": target}


def app(arguments: dict[str, Any]) -> Any:
    """Make the application; Serve calls it with the ``key=value`` of its command line, or with the
    ``args`` of its configuration."""
    try:
        from ray import serve
        from starlette.requests import Request
        from starlette.responses import StreamingResponse
    except ImportError:
        raise MissingExtraError("a Ray Serve application", "ray-serve") from None

    class Lmi:
        def __init__(self, given: list[str]) -> None:
            self._server = LocalServer(given)

        def check_health(self) -> None:
            self._server.check()

        async def __call__(self, request: Request) -> StreamingResponse:
            scope = request.scope
            path, query = scope["path"].removeprefix(scope["root_path"]), scope["query_string"]
            target = quote(path or "/").encode() + (b"?" + query if query else b"")
            answer = await self._server.ask(
                request.method, target, request.headers.raw, await request.body()
            )
            response = StreamingResponse(answer.pieces, answer.status)
            response.raw_headers = answer.headers
            return response

        def __del__(self) -> None:
            if (server := getattr(self, "_server", None)) is not None:
                server.stop()

    deployment = serve.deployment(
        Lmi,
        name="lmi",
        max_ongoing_requests=_MAX_ONGOING,
        graceful_shutdown_timeout_s=_STOP_S,
        ray_actor_options={"num_cpus": _number(float, arguments, "num_cpus", 1.0)},
        autoscaling_config=autoscaling(arguments),
    )
    return deployment.bind(serve_arguments(arguments))
