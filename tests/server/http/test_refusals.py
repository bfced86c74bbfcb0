"""What a server does about requests that it has no room for must cost little: they are many."""

from __future__ import annotations

import asyncio
import gc
import logging

import pytest

from lmi_core.errors import CapacityError
from lmi_server.http import app
from lmi_server.http.admission import Pace
from lmi_server.http.logging import RefusalLog
from tests.server.harness import serving

PROMPT = {"prompt": "a", "model": "model"}


@pytest.mark.parametrize(
    ("path", "body", "connection"),
    [
        ("/v1/completions", PROMPT, "keep-alive"),
        ("/v1/messages", {**PROMPT, "messages": [], "max_tokens": 1}, "keep-alive"),
        ("/generate", {"inputs": "a"}, "keep-alive"),
        ("/invocations", {"inputs": "a"}, "close"),
    ],
)
def test_clients_keep_their_connections_where_their_protocol_does(
    path: str, body: dict[str, object], connection: str
) -> None:
    """A new one costs the server more than the refusal; DJL-Serving closes them."""

    async def run() -> None:
        async with serving(max_in_flight=0) as served:
            answer = await served.post(body, path)
            assert answer.status in (429, 503, 529), answer.body
            assert answer.headers["Connection"] == connection

    asyncio.run(run())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/generate", "/invocations"])
def test_a_refusal_leaves_nothing_to_collect(path: str) -> None:
    """What refers to itself lives until the collector comes, which then takes long."""

    async def run() -> None:
        async with serving(max_in_flight=0) as served:
            gc.collect()
            gc.disable()
            for _ in range(3):
                assert (await served.post(PROMPT, path)).status in (429, 503, 529)
            assert not [each for each in gc.get_objects() if isinstance(each, CapacityError)]

    try:
        asyncio.run(run())
    finally:
        gc.enable()


def test_a_refused_body_does_not_disturb_the_next_request() -> None:
    async def run() -> None:
        async with serving(max_in_flight=0) as served:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 300000\r\n\r\n"
            for _ in range(3):
                writer.write(head + b"GET / HTTP/1.1\r\n\r\n".ljust(300_000))
                answer = await reader.readuntil(b"\r\n\r\n")
                assert answer.startswith(b"HTTP/1.1 429 "), answer
                length = answer.lower().partition(b"content-length: ")[2].split()[0]
                await reader.readexactly(int(length))
            writer.close()

    asyncio.run(run())


def test_one_line_a_second_says_how_many_were_refused(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(app, "RefusalLog", lambda: RefusalLog(clock=lambda: now[0]))

    async def run() -> None:
        async with serving(max_in_flight=0) as served:
            for wait_s, count in ((0.0, 5), (1.5, 1), (1.5, 1)):
                now[0] += wait_s
                for _ in range(count):
                    assert (await served.post(PROMPT, "/v1/completions")).status == 429

    with caplog.at_level(logging.INFO, "lmi_server.http.access"):
        asyncio.run(run())
    fields = [record.fields for record in caplog.records]  # type: ignore[attr-defined]
    assert [each.get("refused_before") for each in fields] == [None, 4, None]
    assert {(each["status"], each["path"]) for each in fields} == {(429, "/v1/completions")}
    assert all("which is the limit" in each["error"] for each in fields)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/generate", "/invocations"])
def test_a_refusal_has_the_headers_of_other_answers(path: str) -> None:
    """It is put together in advance, where there is no origin to speak of."""

    async def run() -> None:
        async with serving(max_in_flight=0, cors_origins=("http://a",)) as served:
            plain = await served.post(PROMPT, path, headers={"x-request-id": "r"})
            assert plain.headers["x-request-id"] == "r"
            other = await served.post(
                PROMPT, path, headers={"x-request-id": "r", "Origin": "http://a"}
            )
            assert other.headers["Access-Control-Allow-Origin"] == "http://a"
            changing = {"Retry-After", "Date", "Vary", "Access-Control-Allow-Origin"}
            assert {k: v for k, v in plain.headers.items() if k not in changing} == {
                k: v for k, v in other.headers.items() if k not in changing
            }

    asyncio.run(run())


def test_other_failures_have_a_line_each(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with serving() as served:
            for _ in range(3):
                assert (await served.post({"prompt": 7}, "/v1/completions")).status == 400

    with caplog.at_level(logging.INFO, "lmi_server.http.access"):
        asyncio.run(run())
    assert len(caplog.records) == 3


def test_callers_are_told_to_stay_away_until_there_is_room() -> None:
    """256 of them, while 100 requests end a second: they come back every 10 s in the end, instead
    of each second."""
    now = [0.0]
    pace = Pace(clock=lambda: now[0])
    due = [0.0] * 256
    num_refused: list[int] = []
    for second in range(120):
        now[0] = float(second)
        for _ in range(100):
            pace.note_end()
        callers = [number for number, at_s in enumerate(due) if at_s <= second]
        for number in callers:
            due[number] = second + pace.refuse()
        num_refused.append(len(callers))
    assert num_refused[0] == 256
    assert 12 < sum(num_refused[60:]) / 60 < 50
    now[0] += 600.0
    for _ in range(9000):
        pace.note_end()
    assert pace.refuse() < 1.3
