"""https in operation: streams, clients that leave or are slow, and what isn't TLS."""

from __future__ import annotations

import asyncio
import json
import os
import ssl

import pytest

from tests.server.certificate import contexts
from tests.server.fake_engine import FakeEngine
from tests.server.harness import Served, eventually, http_request, serving

BODY = json.dumps({"inputs": "a", "parameters": {"max_new_tokens": 50}, "stream": True}).encode()
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    return contexts(tmp_path_factory.mktemp("tls"))


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def connect(served: Served, context: ssl.SSLContext) -> Connection:
    return await asyncio.open_connection("127.0.0.1", served.port, ssl=context)


async def answer(connection: Connection, body: bytes = BODY) -> bytes:
    """One response, of chunks, on a connection that stays open."""
    reader, writer = connection
    writer.write(http_request(body, "Content-Type: application/json"))
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    text = b""
    while size := int(await reader.readline(), 16):
        text += (await reader.readexactly(size + 2))[:-2]
    await reader.readline()
    return text


def test_streams_and_connections_that_stay(tls: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    async def run() -> None:
        async with serving(FakeEngine(), tls=tls[0]) as served:
            connection = await connect(served, tls[1])
            first, second = await answer(connection), await answer(connection)
            connection[1].close()
        async with serving(FakeEngine()) as served:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            plain = await answer((reader, writer))
            writer.close()
        assert first == second == plain
        assert len(first.splitlines()) == 50

    asyncio.run(run())


def test_who_leaves_is_noticed(tls: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    async def run() -> None:
        engine = FakeEngine(delay_s=0.005)
        async with serving(engine, tls=tls[0]) as served:
            reader, writer = await connect(served, tls[1])
            endless = BODY.replace(b"50", b"4000")
            writer.write(http_request(endless, "Content-Type: application/json"))
            await reader.readuntil(b"token")
            writer.transport.abort()
            await eventually(lambda: not engine.running)
            assert len(engine.aborted) == 1

    asyncio.run(run())


def test_a_slow_reader_gets_everything(tls: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    async def run() -> None:
        engine = FakeEngine(text="x" * 40_000)
        async with serving(engine, tls=tls[0]) as served:
            reader, writer = await connect(served, tls[1])
            writer.write(http_request(BODY, "Content-Type: application/json", "Connection: close"))
            text = b""
            while piece := await reader.read(30_000):
                text += piece
                await asyncio.sleep(0.001)
            assert text.count(b"x" * 1000) >= 50 * 40
            writer.close()

    asyncio.run(run())


def test_what_is_not_tls_harms_nobody(
    tls: tuple[ssl.SSLContext, ssl.SSLContext], caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with serving(FakeEngine(), tls=tls[0], receive_timeout_s=1) as served:
            assert b"200 OK" not in await served.raw(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
            await served.raw(b"\x16\x03\x01\xff\xff" + bytes(500))
            silent_reader, silent = await asyncio.open_connection("127.0.0.1", served.port)
            with pytest.raises((OSError, ssl.SSLError)):
                await connect(served, ssl.create_default_context())  # It trusts nobody here.
            connection = await connect(served, tls[1])
            assert await answer(connection)
            connection[1].close()
            # A handshake that never comes ends like a head that never comes.
            assert await silent_reader.read() == b""
            silent.close()

    with caplog.at_level("WARNING"):
        asyncio.run(run())
    assert not caplog.records


def test_descriptors_come_back(tls: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    async def run() -> None:
        async with serving(FakeEngine(), tls=tls[0]) as served:
            before = num_descriptors()
            for _ in range(10):
                connection = await connect(served, tls[1])
                await answer(connection)
                connection[1].close()
                await served.raw(b"no handshake")
            await eventually(lambda: num_descriptors() <= before)

    asyncio.run(run())
