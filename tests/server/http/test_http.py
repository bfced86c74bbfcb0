"""Routes, statuses and headers, with a real client over a real socket."""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any

import pytest

from lmi_core.engine.outputs import FinishReason
from lmi_core.engine.stats import StepRecord
from tests.server.fake_engine import FakeEngine
from tests.server.harness import eventually, serving

BODY = {"inputs": "He is", "parameters": {"max_new_tokens": 2}}
LINES = (
    b'{"token": {"id": 0, "text": " a", "log_prob": -0.5}}\n'
    b'{"token": {"id": 1, "text": " fox", "log_prob": -0.5}, "generated_text": " a fox"}\n'
)


def test_json_and_headers() -> None:
    async def run() -> None:
        async with serving() as served:
            answer = await served.post(BODY)
            assert (answer.status, answer.body) == (200, b'{"generated_text": " a fox"}')
            assert answer.headers["Content-Type"] == "application/json"
            assert answer.headers["Content-Length"] == "28"
            assert answer.headers["Connection"] == "keep-alive"
            assert answer.headers["Pragma"] == "no-cache"
            assert answer.headers["Cache-Control"] == "no-cache; no-store, must-revalidate, private"
            assert answer.headers["Expires"] == "Thu, 01 Jan 1970 00:00:00 UTC"
            assert uuid.UUID(answer.headers["x-request-id"]).version == 4

    asyncio.run(run())


def test_stream() -> None:
    async def run() -> None:
        async with serving() as served:
            answer = await served.post({**BODY, "stream": True})
            assert (answer.status, answer.body) == (200, LINES)
            assert answer.headers["Content-Type"] == "application/jsonlines"
            assert answer.headers["Transfer-Encoding"] == "chunked"
            assert answer.headers["Connection"] == "keep-alive"

    asyncio.run(run())


def test_tokens_arrive_as_they_are_made() -> None:
    async def run() -> None:
        async with (
            serving(FakeEngine(delay_s=0.05)) as served,
            served.client.post("/invocations", json={**BODY, "stream": True}) as response,
        ):
            first = await response.content.readline()
            assert first == LINES.splitlines(keepends=True)[0]
            assert served.engine.running

    asyncio.run(run())


@pytest.mark.parametrize("path", ["/predictions/model", "/invocations?model_name=model"])
def test_routes_to_the_model(path: str) -> None:
    async def run() -> None:
        async with serving() as served:
            assert (await served.post(BODY, path)).status == 200

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/predictions/other", {}),
        ("/predictions/other/1", {}),
        ("/invocations?model_name=other", {}),
        ("/invocations", {"model_name": "other"}),
        ("/invocations", {"X-Amzn-SageMaker-Custom-Attributes": "a=1; model_name = other;x"}),
    ],
)
def test_unknown_model(path: str, headers: dict[str, str]) -> None:
    async def run() -> None:
        async with serving() as served:
            answer = await served.post(BODY, path, headers=headers)
            assert answer.status == 404
            assert answer.body == (
                b'{\n  "code": 404,\n  "type": "ModelNotFoundException",\n'
                b'  "message": "Model or workflow not found: other"\n}\n'
            )
            assert answer.headers["Connection"] == "close"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/nowhere", 404, "ResourceNotFoundException"),
        ("GET", "/nothing/x", 404, "ResourceNotFoundException"),
        ("DELETE", "/metrics", 405, "MethodNotAllowedException"),
        ("POST", "/predictions/model/3", 404, "ModelNotFoundException"),
    ],
)
def test_framework_errors(method: str, path: str, status: int, kind: str) -> None:
    async def run() -> None:
        async with serving() as served, served.client.request(method, path) as response:
            error = json.loads(await response.read())
            assert (response.status, error["code"], error["type"]) == (status, status, kind)

    asyncio.run(run())


def test_handler_property_is_refused() -> None:
    async def run() -> None:
        async with serving() as served:
            answer = await served.post(BODY, headers={"handler": "evil"})
            assert answer.status == 400
            assert b"The handler can't be overridden in a request" in answer.body

    asyncio.run(run())


def test_options_and_get() -> None:
    async def run() -> None:
        async with serving() as served:
            async with served.client.options("/invocations") as response:
                assert (response.status, await response.read()) == (200, b"{}\n")
            async with served.client.get("/invocations") as response:
                assert response.status == 424
                assert (await response.read()).startswith(b'{"code":424,"error":"inputs is empty')

    asyncio.run(run())


def test_ping() -> None:
    async def run() -> None:
        async with serving() as served:
            for method in ("GET", "POST", "PUT"):
                async with served.client.request(method, "/ping") as response:
                    assert response.status == 200
                    assert await response.read() == (
                        b'{\n  "model": {\n    "status": "Healthy"\n  }\n}\n'
                    )
            served.engine.healthy = False
            async with served.client.get("/ping") as response:
                assert response.status == 500
                assert (await response.json())["model"]["status"] == "FAILED"
            answer = await served.post(BODY)
            assert answer.status == 503
            assert json.loads(answer.body)["message"] == "Model is not ready: model"

    asyncio.run(run())


def test_request_ids_may_repeat() -> None:
    async def run() -> None:
        async with serving(FakeEngine(delay_s=0.02)) as served:
            calls = [served.post(BODY, headers={"x-request-id": "same"}) for _ in range(3)]
            assert [answer.status for answer in await asyncio.gather(*calls)] == [200, 200, 200]
            assert len({request.request_id for request in served.engine.requests}) == 3

    asyncio.run(run())


def test_request_id_is_echoed_when_plain() -> None:
    async def run() -> None:
        async with serving() as served:
            answer = await served.post(BODY, headers={"x-request-id": "abc-1"})
            assert answer.headers["x-request-id"] == "abc-1"
            assert served.engine.requests[0].request_id.startswith("abc-1-")
            answer = await served.post(BODY, headers={"x-request-id": "a b"})
            assert answer.headers["x-request-id"] != "a b"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "not valid JSON"),
        ({"inputs": ""}, "inputs is empty"),
        ({"inputs": "a", "parameters": {"top_p": 2}}, "top_p must be above 0 and at most 1, got 2"),
        ({"inputs": "a", "parameters": {"max_new_tokens": 0}}, "max_new_tokens must be at least 1"),
        ({"inputs": "a", "parameters": {"max_new_tokens": 4096}}, "together at most 4096 fit"),
        ({"inputs": "a " * 5000}, "The prompt has 5000 tokens"),
        ({"inputs": "a", "parameters": {"seed": -1}}, "seed must be between 0"),
        ({"inputs": "a", "parameters": {"logprobs": 50, "details": True}}, "logprobs must be"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_request_errors_are_424(body: Any, words: str, stream: bool) -> None:
    async def run() -> None:
        async with serving() as served:
            asked = {**body, "stream": stream} if isinstance(body, dict) else body
            answer = await served.post(asked, headers={"Content-Type": "application/json"})
            assert answer.status == 424
            assert answer.headers["Content-Type"] == "application/json"
            error = json.loads(answer.body)
            assert error["code"] == 424
            assert words in error["error"]
            assert (await served.post(BODY)).status == 200

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_capacity_is_503(stream: bool) -> None:
    async def run() -> None:
        async with serving(FakeEngine(max_running=0)) as served:
            answer = await served.post({**BODY, "stream": stream})
            assert answer.status == 503
            assert answer.headers["Retry-After"] == "2"
            assert json.loads(answer.body)["type"] == "WlmCapacityException"

    asyncio.run(run())


def test_too_many_in_flight_is_503() -> None:
    async def run() -> None:
        async with serving(FakeEngine(delay_s=0.2), max_in_flight=1) as served:
            first = asyncio.create_task(served.post(BODY))
            await eventually(lambda: served.engine.running)
            answer = await served.post(BODY)
            assert answer.status == 503
            assert b"1 requests are being served" in answer.body
            assert (await first).status == 200

    asyncio.run(run())


@pytest.mark.parametrize(("stream", "fail_after"), [(False, 0), (False, 1), (True, 0)])
def test_engine_failure_before_the_body(stream: bool, fail_after: int) -> None:
    async def run() -> None:
        async with serving(FakeEngine(fail_after=fail_after)) as served:
            answer = await served.post({**BODY, "stream": stream})
            assert answer.status == 424
            assert answer.body == b'{"code":424,"error":"step 7 failed: no such kernel"}'

    asyncio.run(run())


def test_engine_failure_in_mid_stream() -> None:
    async def run() -> None:
        async with serving(FakeEngine(fail_after=1)) as served:
            answer = await served.post({**BODY, "stream": True})
            assert answer.status == 200
            assert answer.body.endswith(b'}\n{"code":424,"error":"step 7 failed: no such kernel"}')

    asyncio.run(run())


@pytest.mark.parametrize(("stream", "crash_after"), [(False, 0), (True, 0), (True, 1)])
def test_unexpected_errors_hide_their_detail(
    stream: bool, crash_after: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with serving(FakeEngine(crash_after=crash_after)) as served:
            answer = await served.post({**BODY, "stream": stream}, headers={"x-request-id": "q7"})
            assert b"incident q7" in answer.body
            assert b"secret" not in answer.body
            assert answer.status == (200 if crash_after else 500)

    asyncio.run(run())
    assert "secret detail" in caplog.text


def test_one_bad_prompt_of_a_list_fails_the_call() -> None:
    async def run() -> None:
        async with serving(FakeEngine(delay_s=0.05, max_model_len=8)) as served:
            body = {"inputs": ["a", "a " * 20], "parameters": {"max_new_tokens": 4}}
            answer = await served.post(body)
            assert answer.status == 424
            assert b"The prompt has 20 tokens" in answer.body
            assert not served.engine.running

    asyncio.run(run())


def test_truncate_keeps_the_last_tokens() -> None:
    async def run() -> None:
        async with serving() as served:
            body = {"inputs": "a b c d", "parameters": {"truncate": 3}}
            assert (await served.post(body)).status == 200
            assert served.engine.requests[0].prompt_token_ids == (2, 3, 4)

    asyncio.run(run())


def test_unknown_parameters_are_named_in_a_header() -> None:
    async def run() -> None:
        async with serving() as served:
            body = {"inputs": "a", "parameters": {"temprature": 1}}
            answer = await served.post(body)
            assert answer.headers["x-lmi-ignored-parameters"] == "temprature"

    asyncio.run(run())


def test_metrics() -> None:
    async def run() -> None:
        async with serving() as served:
            await served.post(BODY)
            await served.post({**BODY, "stream": True})
            await served.post(b"{")
            observer = served.metrics.observer("model")
            observer.on_first_token(0.02)
            observer.on_token_intervals([0.002, 0.003])
            observer.on_step(
                StepRecord(num_tokens=9, num_seqs=2, seconds=0.004, native_seconds=0.003)
            )
            observer.on_finish(FinishReason.LENGTH)
            observer.on_finish(None)
            async with served.client.get("/metrics") as response:
                text = await response.text()
                assert response.headers["Content-Type"].startswith("text/plain; version=")
        for line in (
            'lmi_http_requests_total{status="200"} 2.0',
            'lmi_http_requests_total{status="424"} 1.0',
            'lmi_running_sequences{model_name="model"} 0.0',
            'lmi_waiting_requests{model_name="model"} 0.0',
            'lmi_kv_blocks{model_name="model",state="used"} 0.0',
            'lmi_kv_blocks{model_name="model",state="cached"} 7.0',
            'lmi_prompt_tokens_total{model_name="model"} 11.0',
            'lmi_cached_prompt_tokens_total{model_name="model"} 5.0',
            'lmi_generated_tokens_total{model_name="model"} 4.0',
            'lmi_time_to_first_token_seconds_count{model_name="model"} 1.0',
            'lmi_inter_token_latency_seconds_count{model_name="model"} 2.0',
            'lmi_step_seconds_sum{model_name="model"} 0.004',
            'lmi_finished_requests_total{model_name="model",reason="length"} 1.0',
            'lmi_finished_requests_total{model_name="model",reason="error"} 1.0',
        ):
            assert line in text.splitlines()
        assert "lmi_event_loop_lag_seconds_count" in text

    asyncio.run(run())
