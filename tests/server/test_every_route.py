"""What goes wrong below the protocols, on every route of every dialect."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from lmi_core.text.chat import ChatTemplate
from lmi_server.dialects.dialects import DIALECTS
from lmi_server.http.metrics import Metrics
from lmi_server.http.options import ServerOptions
from lmi_server.models.model import Recipe
from lmi_server.models.model_registry import ModelRegistry
from tests.server.fake_engine import FakeEngine
from tests.server.harness import Served, eventually, http_request, serving_models
from tests.server.management.managed import FakeRegistrar
from tests.server.models.test_models import recipe

TEMPLATE = ChatTemplate({"default": "{{ messages | length }}"})
NAMES = tuple(dialect.name for dialect in DIALECTS)
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH")
REGISTER = "/models"
VARIABLES = {
    "model": "model",
    "version": "1",
    "adapter": "a",
    "name": "model",
    "response": "resp_1",
    "file": "file-1",
    "batch": "batch_1",
}


def paths(dialect: str) -> dict[str, set[str]]:
    """The methods of each path, with names of what there is for its variables."""
    found: dict[str, set[str]] = {}
    (routes,) = [each.routes for each in DIALECTS if each.name == dialect]
    for route in routes:
        path = re.sub(r"\{(\w+)[^}]*\}", lambda match: VARIABLES[match[1]], route.path)
        found.setdefault(f"/{dialect}{path}", set()).add(route.method)
    return found


def taking_bodies() -> Iterator[tuple[str, str]]:
    """Dialect and path of the routes that read a body."""
    for dialect in DIALECTS:
        for route in dialect.routes:
            if route.bodies or (route.method, route.path) == ("POST", REGISTER):
                path = re.sub(r"\{(\w+)[^}]*\}", lambda match: VARIABLES[match[1]], route.path)
                yield dialect.name, f"/{dialect.name}{path}"


def sendable() -> Iterator[tuple[str, str]]:
    """Path and method of every route that may be sent a body."""
    for dialect in DIALECTS:
        for path, methods in paths(dialect.name).items():
            for method in sorted(methods & {"POST", "PUT", "PATCH", "*"}):
                yield path, "POST" if method == "*" else method


BODY_ROUTES = sorted(set(taking_bodies()))
every_body_route = pytest.mark.parametrize(("dialect", "path"), BODY_ROUTES)


@asynccontextmanager
async def serving(
    engine: FakeEngine | None = None, *, others: Sequence[Recipe] = (), **options: Any
) -> AsyncIterator[Served]:
    """One model named ``model``, and others; nothing runs when it ends."""
    options = {"port": 0, "drain_timeout_s": 0.2, "chat_template": TEMPLATE, **options}
    engine = engine or FakeEngine()
    models = ModelRegistry(
        ServerOptions(**options),
        Metrics(),
        [recipe("model:1", engine, **options), *others],
        registrar=FakeRegistrar(**options),
    )
    async with models, serving_models(models) as served:
        yield served
    assert not engine.running


def posted(body: bytes, path: str, *headers: str) -> bytes:
    """A request of JSON, from the same machine as management wants it."""
    data = http_request(body, "Content-Type: application/json", *headers, path=path)
    return data.replace(b"Host: x", b"Host: localhost")


def check_form(dialect: str, path: str, status: int, head: bytes, body: bytes) -> None:
    """An error in the dialect's form, and with its headers."""
    if status == 413 and dialect == "lmi":
        assert body == b""
    elif dialect == "lmi":
        error = json.loads(body)
        assert set(error) in ({"code", "error"}, {"code", "type", "message"}), path
        assert error["code"] == status
    elif dialect == "openai":
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}, path
    elif dialect == "anthropic":
        assert set(json.loads(body)["error"]) == {"message", "type"}, path
    else:
        assert b"text/plain" in head or {"error", "error_type"} <= set(json.loads(body)), path
    assert b"\r\nServer: lmi/" in head
    assert b"Traceback" not in body


def parsed(answer: bytes) -> tuple[int, bytes, bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), head, body


def test_the_table_has_every_dialect() -> None:
    assert {dialect for dialect, _ in BODY_ROUTES} == set(NAMES)
    assert ("lmi", "/lmi/models") in BODY_ROUTES
    assert len(BODY_ROUTES) >= 17


@pytest.mark.parametrize("dialect", NAMES)
def test_wrong_methods(dialect: str) -> None:
    async def run() -> None:
        async with serving() as served:
            for path, methods in paths(dialect).items():
                for method in METHODS:
                    if method in methods or "*" in methods:
                        continue
                    answer = await served.ask(method, path)
                    assert answer.status == 405, (method, path)
                    assert methods <= set(answer.headers["Allow"].split(", "))
                    if dialect == "tgi":
                        assert answer.body == b""
                    else:
                        check_form(dialect, path, 405, b"\r\nServer: lmi/", answer.body)

    asyncio.run(run())


def chunked(path: str) -> bytes:
    return posted(b"", path).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")


def test_oversized_bodies() -> None:
    async def refused(served: Served, dialect: str, path: str, data: bytes) -> None:
        status, head, text = parsed(await served.raw(data))
        assert status == 413, path
        check_form(dialect, path, status, head, text)

    async def run() -> None:
        large = b"fff\r\n" + b" " * 0xFFF + b"\r\n"
        async with serving(max_request_bytes=1000) as served, asyncio.TaskGroup() as group:
            for dialect, path in BODY_ROUTES:
                for data in (posted(b" " * 1001, path), chunked(path) + large):
                    group.create_task(refused(served, dialect, path, data))

    asyncio.run(run())


def test_slow_bodies() -> None:
    async def answered(served: Served, dialect: str, path: str) -> None:
        data = posted(b"{", path).replace(b"Content-Length: 1\r", b"Content-Length: 9\r")
        status, head, text = parsed(await served.raw(data))
        assert status == 408, path
        check_form(dialect, path, status, head, text)

    async def run() -> None:
        # Within which all of them have said whom they ask.
        async with serving(receive_timeout_s=1) as served, asyncio.TaskGroup() as group:
            for dialect, path in BODY_ROUTES:
                group.create_task(answered(served, dialect, path))

    asyncio.run(run())


@every_body_route
def test_bodies_that_do_not_decode(dialect: str, path: str) -> None:
    async def run() -> None:
        async with serving() as served:
            packed = posted(b"neither", path, "Content-Encoding: gzip")
            for data in (packed, chunked(path) + b"zz\r\nx\r\n0\r\n\r\n"):
                status, head, text = parsed(await served.raw(data))
                assert status == 400
                check_form(dialect, path, status, head, text)

    asyncio.run(run())


@every_body_route
@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"nonsense",
        b"[]",
        b'{"url": "a',
        b'{"url": NaN, "inputs": NaN, "prompt": NaN, "messages": NaN, "tokens": NaN}',
        b'{"url": "\\ud800", "inputs": "\\ud800", "prompt": "\\ud800", "model_name": "m",'
        b' "messages": "\\ud800", "tokens": "\\ud800"}',
        b'{"url": "u", "x": ' + b"[" * 64 + b"]" * 64 + b"}",
        b'{"x":' * 100_000,
    ],
    ids=lambda body: repr(body[:12]),
)
def test_malformed_json(dialect: str, path: str, body: bytes) -> None:
    async def run() -> None:
        async with serving() as served:
            data = posted(body, path, "Connection: close")
            status, head, text = parsed(await served.raw(data))
            expected = {
                "lmi": (400, 424),
                "openai": (400,),
                "anthropic": (400,),
                "tgi": (400, 422),
                "tei": (422,),
            }[dialect]
            assert status in expected, text
            check_form(dialect, path, status, head, text)
            assert not served.models.versions("m")

    asyncio.run(run())


@every_body_route
def test_pipelined_requests(dialect: str, path: str) -> None:
    """Each has its answer, in order; an error closes the connection where LMI's does."""

    async def run() -> None:
        async with serving() as served:
            ping = b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n"
            last = ping.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
            bad = posted(b"{", path)
            answer = await served.raw(ping + last)
            assert answer.count(b"HTTP/1.1 200 OK") == 2
            answer = await served.raw(ping + bad + last)
            statuses = re.findall(rb"HTTP/1\.1 (\d+)", answer)
            assert len(statuses) == (2 if dialect == "lmi" else 3)
            assert statuses[0] == b"200"
            assert statuses[1] in (b"400", b"424", b"422")

    asyncio.run(run())


@every_body_route
@pytest.mark.parametrize("num_bytes", [0, 1])
def test_half_closed_connections(dialect: str, path: str, num_bytes: int) -> None:
    """A client that ends its side before its body is whole has left: nothing is kept for it."""

    async def run() -> None:
        async with serving() as served:
            whole = posted(b"{}" * 50, path)
            cut = whole[: len(whole) - 100 + num_bytes]
            async with asyncio.timeout(20):
                assert await served.raw(cut, half_close=True) == b""
            await eventually(lambda: served.models.num_in_flight == 0)

    asyncio.run(run())


@pytest.mark.parametrize("dialect", NAMES)
def test_slow_heads(dialect: str) -> None:
    """Cut off without an answer: nobody knows yet what was to be asked."""

    async def run() -> None:
        async with serving(receive_timeout_s=0.05) as served, asyncio.TaskGroup() as group:
            for path, methods in paths(dialect).items():
                method = "POST" if "*" in methods else min(methods)
                head = f"{method} {path} HTTP/1.1\r\nHost: x\r\n".encode()
                group.create_task(is_cut_off(served, head))

    async def is_cut_off(served: Served, head: bytes) -> None:
        async with asyncio.timeout(20):
            with suppress(ConnectionResetError):  # a busy machine's client may write too late
                assert await served.raw(head) == b""

    asyncio.run(run())


@pytest.mark.parametrize("dialect", NAMES)
def test_unknown_models(dialect: str) -> None:
    """In the path, in each dialect's own form."""

    async def run() -> None:
        (routes,) = [each.routes for each in DIALECTS if each.name == dialect]
        async with serving() as served:
            for route in routes:
                if "{model}" not in route.path:
                    continue
                path = re.sub(r"\{(\w+)[^}]*\}", "other", f"/{dialect}{route.path}")
                method = "POST" if route.method == "*" else route.method
                answer = await served.ask(method, path, json={"inputs": "x"})
                assert answer.status == 404, (method, path)
                check_form(dialect, path, 404, b"\r\nServer: lmi/", answer.body)
                assert b"other" in answer.body

    asyncio.run(run())
