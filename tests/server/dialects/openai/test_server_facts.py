"""What vLLM's server tells of itself: version, load, tokenizer."""

from __future__ import annotations

import asyncio
import json

import pytest

from lmi_core.version import __version__
from tests.engine.fake_runner import FakeRunner
from tests.server.fake_engine import FakeEngine
from tests.server.harness import eventually, serving
from tests.server.models.test_real_engine import serving_engine

FORM = "endpoint-load-metrics-format"


def test_version_and_load() -> None:
    async def run() -> None:
        async with serving(FakeEngine(delay_s=0.002)) as served:
            answer = await served.ask("GET", "/version")
            assert json.loads(answer.body) == {"version": __version__}
            answer = await served.ask("GET", "/load")
            assert json.loads(answer.body) == {"server_load": 0}
            asked = {"prompt": "a", "max_tokens": 4000}
            calls = [asyncio.create_task(served.post(asked, "/v1/completions")) for _ in range(3)]
            await eventually(lambda: len(served.engine.running) == 3)
            answer = await served.ask("GET", "/load")
            assert json.loads(answer.body) == {"server_load": 3}
            for call in calls:
                call.cancel()
            await eventually(lambda: not served.engine.running)

    asyncio.run(run())


def test_tokenizer() -> None:
    async def run() -> None:
        async with serving_engine(FakeRunner()) as (served, engine):
            answer = await served.ask("GET", "/tokenizer_info")
            assert answer.status == 200
            assert json.loads(answer.body) == dict(engine.tokenizer.config)

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_load_reports(stream: bool) -> None:
    async def run() -> None:
        async with serving() as served:
            asked = {"prompt": "a", "max_tokens": 2, "stream": stream}
            for form, expected in (
                ("text", "TEXT named_metrics.kv_cache_usage_perc="),
                ("JSON", 'JSON {"named_metrics": {"kv_cache_usage_perc": '),
            ):
                answer = await served.post(asked, "/v1/completions", headers={FORM: form})
                report = answer.headers["endpoint-load-metrics"]
                assert report.startswith(expected)
                assert "num_requests_waiting" in report
            for headers in ({}, {FORM: "xml"}):
                answer = await served.post(asked, "/v1/completions", headers=headers)
                assert "endpoint-load-metrics" not in answer.headers

    asyncio.run(run())
