"""Broken HTTP gets the dialect's form of error; slow heads and bodies are cut off."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from tests.server.harness import Served, http_request, serving


@pytest.mark.parametrize("path", ["/invocations", "/v1/completions", "/generate"])
def test_slow_bodies(path: str) -> None:
    async def run() -> None:
        async with serving(receive_timeout_s=0.4) as served:
            head = http_request(b"{", "Content-Type: application/json", path=path)
            status, _ = parsed(await served.raw(head.replace(b"h: 1\r", b"h: 9\r")))
            assert status == 408

    asyncio.run(run())


def parsed(answer: bytes) -> tuple[int, bytes]:
    """Status and body of one response."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


NOT_HTTP = [
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    (b"POST PATH HTTP/9.9\r\n\r\n", 400),
    (b"POST PATH HTTP/1.1\r\nHost: x\r\nBad Header: y\r\n\r\n", 400),
    (b"POST PATH HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n", 400),
    (b"POST PATH HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400),
    (b"POST PATH HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
    (
        b"POST PATH HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        400,
    ),
    (b"POST PATH HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 9000 + b"\r\n\r\n", 431),
    (b"POST PATH?" + b"a" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
    (b"POST PATH HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 200 + b"\r\n", 400),
    (b"POST PATH HTTP/1.1\r\nHost: x\r\nX: a\x00b\r\n\r\n", 400),
]


@pytest.mark.parametrize("path", ["/invocations", "/v1/completions", "/generate"])
def test_what_is_not_http_gets_the_dialects_form(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with serving() as served:
            for number, (data, expected) in enumerate(NOT_HTTP):
                answer = await served.raw(data.replace(b"PATH", path.encode()))
                status, body = parsed(answer)
                assert status == expected, (data, answer)
                assert b"\r\nServer: lmi/" in answer
                assert b"x-request-id: " in answer
                form = path if number else "/invocations"  # a TLS hello has no path
                if form == "/generate":
                    assert body.startswith(b"The request")
                elif form == "/invocations":
                    assert json.loads(body)["code"] == status
                else:
                    assert json.loads(body)["error"]["type"] == "invalid_request_error"
            assert (await served.post({"inputs": "x"})).status == 200
            async with served.client.get("/metrics") as response:
                assert 'lmi_http_requests_total{status="400"}' in await response.text()

    asyncio.run(run())
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_bad_request_after_a_good_one() -> None:
    async def run() -> None:
        async with serving() as served:
            reader, writer = await open_and_use(served)
            writer.write(b"GET /v1/models HTTP/1.1\r\nBad Header: x\r\n\r\n")
            status, body = parsed((await reader.read()).lstrip(b'"}\n '))
            assert status == 400
            assert json.loads(body)["error"]["type"] == "invalid_request_error"
            writer.close()

    asyncio.run(run())


def test_malformed_chunks() -> None:
    async def run() -> None:
        async with serving() as served:
            head = b"POST /invocations HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            status, body = parsed(await served.raw(head + b"zz\r\nhello\r\n0\r\n\r\n"))
            assert status == 400
            assert b"chunks are malformed" in body or b"not valid HTTP" in body

    asyncio.run(run())


def test_a_body_that_will_be_refused_is_not_asked_for() -> None:
    async def run() -> None:
        async with serving(max_request_bytes=1000) as served:
            body = b'{"inputs": "x"}'
            request = http_request(body, "Expect: 100-continue", "Connection: close")
            answer = await served.raw(request)
            assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")
            large = request.replace(b"Content-Length: 15", b"Content-Length: 5000")
            answer = await served.raw(large.removesuffix(body))
            assert answer.startswith(b"HTTP/1.1 413 ")
            status, body = parsed(await served.raw(request.replace(b"100-continue", b"tea")))
            assert (status, json.loads(body)["code"]) == (417, 417)

    asyncio.run(run())


async def open_and_use(served: Served) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A kept-alive connection that has had one answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
    await reader.readuntil(b"Healthy")
    return reader, writer


def test_a_slow_second_head_is_cut_off() -> None:
    async def run() -> None:
        async with serving(receive_timeout_s=0.4, keepalive_timeout_s=60) as served:
            reader, writer = await open_and_use(served)
            started = time.monotonic()
            for piece in (b"POST /invocations HTTP/1.1\r\n", b"Host: x\r\n"):
                writer.write(piece)
                await asyncio.sleep(0.05)
            await reader.read()
            assert 0.35 < time.monotonic() - started < 30
            writer.close()

    asyncio.run(run())


def test_an_idle_connection_has_no_deadline_for_its_next_head() -> None:
    async def run() -> None:
        async with serving(receive_timeout_s=0.4, keepalive_timeout_s=60) as served:
            reader, writer = await open_and_use(served)
            await asyncio.sleep(0.8)
            writer.write(http_request(b'{"inputs": "x"}', "Connection: close"))
            assert b"generated_text" in await reader.read()
            writer.close()

    asyncio.run(run())
