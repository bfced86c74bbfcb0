"""Clients that disconnect, read slowly, send slowly, pipeline or send nonsense."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import time
from contextlib import suppress

import pytest

from lmi_server.http.connections import Connection
from tests.server.configured import configured
from tests.server.fake_engine import FakeEngine
from tests.server.harness import eventually, http_request, serving
from tests.server.watchdog import shares_process


def generation(num_tokens: int, *, stream: bool) -> bytes:
    body = {"inputs": "x", "parameters": {"max_new_tokens": num_tokens}, "stream": stream}
    return http_request(json.dumps(body).encode())


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_aborts(stream: bool) -> None:
    async def run() -> None:
        async with serving(FakeEngine(delay_s=0.01)) as served:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(generation(4000, stream=stream))
            if stream:
                await reader.readuntil(b"log_prob")
            await eventually(lambda: served.engine.running)
            writer.transport.abort()
            await eventually(lambda: served.engine.aborted)
            assert not served.engine.running
            assert served.engine.num_tokens < 1000

    asyncio.run(run())


def test_half_closed_connection_aborts() -> None:
    async def run() -> None:
        async with serving(FakeEngine(delay_s=0.01)) as served:
            assert await served.raw(generation(4000, stream=False), half_close=True) == b""
            await eventually(lambda: not served.engine.running)

    asyncio.run(run())


def test_disconnect_leaves_others_alone() -> None:
    async def run() -> None:
        async with serving(FakeEngine(delay_s=0.005)) as served:
            body = {"inputs": "x", "parameters": {"max_new_tokens": 40}, "stream": True}
            other = asyncio.create_task(served.post(body))
            _, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(generation(4000, stream=True))
            await eventually(lambda: len(served.engine.running) == 2)
            writer.transport.abort()
            answer = await other
            assert len(answer.body.splitlines()) == 40

    asyncio.run(run())


def test_slow_reader_is_held_back_then_gets_everything() -> None:
    """The server must not buffer without bound: generation waits for the client."""

    async def run() -> None:
        engine = FakeEngine(text="x" * 20_000)
        async with serving(engine) as served:
            shares_process.set(True)  # with a client that counts 10 MB
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
                client.setblocking(False)
                await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", served.port))
                reader, writer = await asyncio.open_connection(sock=client)
                writer.write(generation(500, stream=True))
                await eventually(lambda: engine.num_tokens > 10)
                await asyncio.sleep(0.2)
                assert engine.num_tokens < 450
                pieces = []
                while not pieces or not pieces[-1].endswith(b"0\r\n\r\n"):
                    pieces.append(await reader.read(1 << 20))
                assert b"".join(pieces).count(b'{"token"') == 500
                writer.close()

    asyncio.run(run())


def test_reader_that_never_reads_is_cut_off() -> None:
    async def run() -> None:
        engine = FakeEngine(text="x" * 20_000)
        async with serving(engine, send_timeout_s=0.2) as served:
            _, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(generation(4000, stream=True))
            await eventually(lambda: engine.aborted)
            writer.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "head", [b"", b"POST /invoca", b"POST /invocations HTTP/1.1\r\nHost: x\r\n"]
)
def test_slow_headers_are_cut_off(head: bytes) -> None:
    async def run() -> None:
        async with serving(receive_timeout_s=0.2) as served:
            started = time.monotonic()
            assert await served.raw(head) == b""
            assert time.monotonic() - started < 30

    asyncio.run(run())


def test_slow_body_is_408() -> None:
    async def run() -> None:
        async with serving(**configured("request_timeout=1")) as served:
            head = http_request(b"{").replace(b"Content-Length: 1", b"Content-Length: 100")
            answer = await served.raw(head)
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b"The body did not arrive within 1 s" in answer

    asyncio.run(run())


@pytest.mark.parametrize("declared", [True, False])
def test_enormous_body_is_413(declared: bool) -> None:
    async def run() -> None:
        async with serving(max_request_bytes=1000) as served:
            if declared:
                request = http_request(b"").replace(
                    b"Content-Length: 0", b"Content-Length: 1000000000000"
                )
            else:
                request = (
                    b"POST /invocations HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
                    b"fff\r\n" + b"x" * 0xFFF + b"\r\n"
                )
            answer = await served.raw(request)
            assert answer.startswith(b"HTTP/1.1 413 ")
            assert answer.endswith(b"\r\n\r\n")

    asyncio.run(run())


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_body_that_does_not_decompress_is_400(encoding: str) -> None:
    async def run() -> None:
        async with serving() as served:
            request = http_request(b"neither", f"Content-Encoding: {encoding}")
            answer = await served.raw(request)
            assert answer.startswith(b"HTTP/1.1 400 ")
            assert encoding.encode() in answer.split(b"\r\n\r\n")[1]

    asyncio.run(run())


def test_a_body_that_grows_when_decompressed_is_413() -> None:
    async def run() -> None:
        async with serving(max_request_bytes=100_000) as served:
            body = gzip.compress(b" " * 10_000_000)
            answer = await served.raw(http_request(body, "Content-Encoding: gzip"))
            assert answer.startswith(b"HTTP/1.1 413 ")

    asyncio.run(run())


@pytest.mark.parametrize("num_bytes", [60_000_000, 300_000_000])
def test_bodies_are_decompressed_a_piece_at_a_time(num_bytes: int) -> None:
    """Within the limit, and behind the refusal. (The server's loop is watched.)"""
    body = gzip.compress(b" " * num_bytes, compresslevel=1)

    async def run() -> None:
        async with serving() as served:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(http_request(body, "Content-Encoding: gzip", "Connection: close"))
            expected = 424 if num_bytes < 64 << 20 else 413
            assert (await reader.readline()).startswith(f"HTTP/1.1 {expected} ".encode())
            with suppress(ConnectionResetError):  # by a server that stopped reading it
                await reader.read()
            writer.close()

    asyncio.run(run())


@pytest.mark.parametrize("encoding", ["gzip", "identity"])
def test_long_bodies_arrive_whole(encoding: str) -> None:
    """And the next request of their connection behind them."""
    text = "".join(chr(65 + i * i % 57) for i in range(3_000_000))
    body = json.dumps(
        {"inputs": "x", "ignored": text, "parameters": {"max_new_tokens": 2}}
    ).encode()
    sent = gzip.compress(body, compresslevel=1) if encoding == "gzip" else body

    async def run() -> None:
        async with serving() as served:
            first = http_request(sent, f"Content-Encoding: {encoding}")
            second = http_request(b'{"inputs": "x"}', "Connection: close")
            answer = await served.raw(first + second)
            assert answer.count(b"HTTP/1.1 200 OK") == 2

    asyncio.run(run())


def test_pipelined_requests_are_answered_in_order() -> None:
    async def run() -> None:
        async with serving() as served:
            requests = [
                http_request(
                    json.dumps({"inputs": "x", "parameters": {"max_new_tokens": n}}).encode(),
                    *(["Connection: close"] if n == 3 else []),
                )
                for n in (1, 2, 3)
            ]
            answer = await served.raw(b"".join(requests))
            texts = [part.split(b'"}')[0] for part in answer.split(b'"generated_text": "')[1:]]
            assert texts == [b" a", b" a fox", b' a fox \\"quoted\\"']

    asyncio.run(run())


@pytest.mark.parametrize(
    "nonsense", [b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n"]
)
def test_nonsense_is_answered_or_closed(nonsense: bytes) -> None:
    async def run() -> None:
        async with serving(receive_timeout_s=0.3) as served:
            answer = await served.raw(nonsense)
            assert answer == b"" or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4"))
            assert (await served.post({"inputs": "x"})).status == 200

    asyncio.run(run())


def test_idle_connections_cost_nothing_to_others() -> None:
    async def run() -> None:
        async with serving() as served:
            idle = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(200)]
            assert (await served.post({"inputs": "x"})).status == 200
            for _, writer in idle:
                writer.close()

    asyncio.run(run())


def test_draining_finishes_streams_and_refuses_new_requests() -> None:
    async def run() -> None:
        async with serving(FakeEngine(delay_s=0.02), drain_timeout_s=5.0) as served:
            body = {"inputs": "x", "parameters": {"max_new_tokens": 20}, "stream": True}
            running = asyncio.create_task(served.post(body))
            await eventually(lambda: served.engine.running)
            stop = asyncio.create_task(served.server.stop(asyncio.Event()))
            answer = await running
            assert len(answer.body.splitlines()) == 20
            await stop
            with pytest.raises(OSError):
                await asyncio.open_connection("127.0.0.1", served.port)

    asyncio.run(run())


def test_draining_takes_the_rest_of_a_body_and_ends_idle_connections() -> None:
    async def run() -> None:
        async with serving(drain_timeout_s=20.0, receive_timeout_s=5.0) as served:
            request = generation(3, stream=False)
            streams = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(3)]
            (reader, writer), (new, _), (used, user) = streams
            user.write(request)
            await used.readuntil(b"generated_text")
            writer.write(request[:-20])
            await eventually(lambda: served.models.num_in_flight)
            stop = asyncio.create_task(served.server.stop(asyncio.Event()))
            async with asyncio.timeout(4):
                assert await new.read() == b""
                await used.read()
            for part in (request[-20:-10], request[-10:]):
                writer.write(part)
                await asyncio.sleep(0.05)
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 200"), answer
            await stop
            for _, writer in streams:
                writer.close()

    asyncio.run(run())


def test_a_connection_that_is_closed_when_it_has_just_begun_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin = Connection.connection_made

    def closed_at_once(self: Connection, transport: asyncio.BaseTransport) -> None:
        begin(self, transport)
        self.close()

    async def run() -> None:
        async with serving() as served:
            monkeypatch.setattr(Connection, "connection_made", closed_at_once)
            async with asyncio.timeout(4):
                assert await served.raw(b"") == b""

    asyncio.run(run())


def test_draining_times_out() -> None:
    async def run() -> None:
        engine = FakeEngine(delay_s=0.05)
        async with serving(engine, **configured("graceful_termination_timeout=1")) as served:
            body = {"inputs": "x", "parameters": {"max_new_tokens": 4000}, "stream": True}
            running = asyncio.create_task(served.post(body))
            await eventually(lambda: engine.running)
            started = time.monotonic()
            await served.server.stop(asyncio.Event())
            assert 1 <= time.monotonic() - started < 60
            assert engine.aborted
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(run())


def test_a_client_that_leaves_in_mid_stream_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with serving(FakeEngine(delay_s=0.001, batch_size=3)) as served:
            for _ in range(20):
                reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
                writer.write(generation(500, stream=True))
                await reader.readuntil(b"log_prob")
                writer.transport.abort()
            await eventually(lambda: not served.engine.running)

    asyncio.run(run())
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
