"""DJL-Serving's routes about the server itself, and what the log says of requests."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path

import pytest

from lmi_server.http.banner import banner, route_list, scope_of
from lmi_server.http.logging import ConsoleFormatter, JsonFormatter
from lmi_server.http.metrics import Metrics
from lmi_server.http.options import ServerOptions
from lmi_server.models.loaded_model import Shared
from lmi_server.models.model import ServedModel, recipe_of_engine
from tests.server.fake_engine import FakeEngine
from tests.server.harness import serving
from tests.server.models.test_models import LMI


def test_metrics_are_where_djl_serving_has_them() -> None:
    async def run() -> None:
        async with serving() as served:
            await served.post(LMI)
            everything = (await served.ask("GET", "/server/metrics")).body.decode()
            assert 'lmi_http_requests_total{status="200"} 1.0' in everything
            assert "lmi_event_loop_lag_seconds" in everything
            names = "name[]=lmi_http_requests_total&name[]=no_such"
            some = (await served.ask("GET", f"/server/metrics?{names}")).body.decode()
            assert "lmi_http_requests_total{" in some
            assert "lmi_event_loop_lag_seconds" not in some
            # A metric's own name is that of all its samples, and so are those read at a scrape.
            names = "name[]=lmi_http_request_seconds&name[]=lmi_requests_total"
            some = (await served.ask("GET", f"/metrics?{names}")).body.decode()
            assert "lmi_http_request_seconds_bucket{" in some
            assert 'lmi_requests_total{model_name="model"} 1.0' in some
            assert "lmi_http_requests_total" not in some

    asyncio.run(run())


def test_the_log_level_can_be_changed() -> None:
    root = logging.getLogger()
    before = root.level

    async def run() -> None:
        async with serving() as served:
            answer = await served.ask("POST", "/server/logging?level=debug")
            assert (answer.status, json.loads(answer.body)) == (200, {"status": "OK"})
            assert root.level == logging.DEBUG
            answer = await served.ask("POST", "/server/logging?level=loud")
            assert answer.status == 400
            assert "allowed are trace, debug, info" in json.loads(answer.body)["message"]
            assert root.level == logging.DEBUG

    try:
        asyncio.run(run())
    finally:
        root.setLevel(before)


def test_a_route_of_management_elsewhere_says_where() -> None:
    async def run() -> None:
        async with serving(host="0.0.0.0") as served:
            for path in ("/models", "/server/logging?level=debug"):
                answer = await served.ask("POST", path)
                assert answer.status == 404
                assert "--admin-key" in json.loads(answer.body)["message"]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"inputs": ""}, "inputs is empty; send at least one character of prompt"),
        ({"inputs": "a", "parameters": {"top_k": "x"}}, "parameters.top_k must be int | null"),
    ],
)
def test_the_log_says_why_a_request_was_refused(
    body: dict[str, object], error: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        with caplog.at_level("INFO", "lmi_server.http.access"):
            async with serving() as served:
                assert (await served.post(body)).status == 424
                assert (await served.post(LMI)).status == 200

    asyncio.run(run())
    refused, answered = (
        vars(record)["fields"] for record in caplog.records if "fields" in vars(record)
    )
    assert refused["error"].startswith(error)
    assert "error" not in answered


def test_the_log_says_why_a_stream_ended(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        body = {"inputs": "a", "parameters": {"max_new_tokens": 5}, "stream": True}
        engine = FakeEngine(fail_after=2)
        with caplog.at_level("INFO", "lmi_server.http.access"):
            async with serving(engine) as served:
                assert (await served.post(body)).status == 200

    asyncio.run(run())
    assert vars(caplog.records[-1])["fields"]["error"] == "step 7 failed: no such kernel"


def test_a_line_of_the_log_quotes_what_has_spaces() -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "request", (), None)
    record.fields = {"status": 424, "error": 'no "x"\nhere', "path": "/a b", "ms": 0.5}
    line = ConsoleFormatter().format(record)
    assert line.endswith(' request status=424 error="no \\"x\\"\\nhere" path="/a b" ms=0.5')


def test_logs_hold_nothing_that_moves_a_cursor() -> None:
    text = "\x1b[2J\r\n\x9b \u202e é"
    for formatter in (ConsoleFormatter(), JsonFormatter()):
        try:
            raise ValueError(text)
        except ValueError:
            record = logging.LogRecord("x", logging.INFO, "", 0, text, (), sys.exc_info())
        record.fields = {"path": text}
        line = formatter.format(record)
        assert all(part.isprintable() for part in line.split("\n"))
    entry = json.loads(line)
    assert entry["message"] == entry["path"] == text


def test_the_banner_says_who_can_reach_the_server() -> None:
    url = "http://127.0.0.1:8080"
    assert scope_of("127.0.0.1") == ""
    text = banner(url, [], scope=scope_of("0.0.0.0"))
    assert text.startswith(f"Listening on {url} (and on every other address, 0.0.0.0)\n")
    assert "Authorization" not in route_list([], url)
    assert "-H 'Authorization: Bearer KEY'" in route_list([], url, needs_key=True)


def test_the_banner_has_the_models_path_and_not_its_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "of mine" / "köln"
    recipe = recipe_of_engine(FakeEngine(), ServerOptions(), f"{directory.as_uri()}/")
    model = ServedModel(recipe, Shared(Metrics(), None, None), loaded_at_startup=True)
    assert f"model from {directory}, loading\n" in banner("", [model])
    directory.parent.mkdir()
    monkeypatch.chdir(directory.parent)
    assert "model from köln, loading\n" in banner("", [model])
