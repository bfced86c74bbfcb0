"""A server around a scripted engine, in the test's own event loop, and a raw HTTP client."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from lmi_server.http.app import MODELS
from lmi_server.http.lifecycle import HttpServer, bind_all
from lmi_server.http.metrics import Metrics
from lmi_server.http.options import ServerOptions
from lmi_server.models.model import recipe_of_engine
from lmi_server.models.model_registry import ModelRegistry
from tests.server.fake_engine import FakeEngine
from tests.server.watchdog import watched


@dataclass
class Served:
    engine: FakeEngine
    server: HttpServer
    metrics: Metrics
    client: aiohttp.ClientSession
    port: int
    management_port: int | None = None

    @property
    def models(self) -> Any:
        return self.server.app[MODELS]

    async def post(self, body: Any, path: str = "/invocations", **kwargs: Any) -> Answer:
        kwargs["data" if isinstance(body, bytes) else "json"] = body
        async with self.client.post(path, **kwargs) as response:
            return Answer(response.status, response.headers, await response.read())

    async def ask(self, method: str, path: str, **kwargs: Any) -> Answer:
        async with self.client.request(method, path, **kwargs) as response:
            return Answer(response.status, response.headers, await response.read())

    async def raw(self, data: bytes, *, half_close: bool = False) -> bytes:
        """Send bytes on a new connection and read until the server closes it."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        if half_close:
            writer.write_eof()
        answer = await reader.read()
        writer.close()
        return answer


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes


@asynccontextmanager
async def serving(engine: FakeEngine | None = None, **options: Any) -> AsyncIterator[Served]:
    """Leaving stops the server and requires that nothing runs in the engine any more."""
    engine = engine or FakeEngine()
    async with serving_backend(engine, Metrics(), **options) as served:
        yield served
    assert not engine.running


@asynccontextmanager
async def serving_backend(backend: Any, metrics: Metrics, **options: Any) -> AsyncIterator[Served]:
    options = {"drain_timeout_s": 0.2, **options}
    chosen = ServerOptions(port=0, **options)
    # The backend's end isn't the server's business.
    recipe = recipe_of_engine(nullcontext(backend), chosen)
    async with serving_models(ModelRegistry(chosen, metrics, [recipe])) as served:
        yield replace(served, engine=backend)


@asynccontextmanager
async def serving_models(models: ModelRegistry, *, load: bool = True) -> AsyncIterator[Served]:
    """``load``: before the port opens."""
    server = HttpServer(models)
    with bind_all(replace(models.options, host="127.0.0.1", port=0)) as sockets:
        if load:
            await models.load_all()
        port, *others = (bound.getsockname()[1] for bound in sockets)
        await server.start(*sockets)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
            with watched(os.environ.get("PYTEST_CURRENT_TEST", "")):
                yield Served(FakeEngine(), server, models.metrics, client, port, *others)
        await server.stop(asyncio.Event())


def http_request(body: bytes, *headers: str, path: str = "/invocations") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def eventually(condition: Any, timeout_s: float = 30.0) -> None:
    """Wait until ``condition()`` holds, which takes its time on a busy machine."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
