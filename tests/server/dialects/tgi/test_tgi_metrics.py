"""TGI's metrics: names without a suffix, reasons of failures, cumulative buckets."""

from __future__ import annotations

import asyncio

from prometheus_client.parser import text_string_to_metric_families

from lmi_server.dialects.tgi.options import TgiOptions
from lmi_server.http.histogram import Histogram
from tests.engine.fake_runner import FakeRunner
from tests.server.dialects.tgi.test_tgi_http import serving
from tests.server.harness import Served


async def read(served: Served) -> dict[str, float]:
    """Samples by name and labels; the text must be one that Prometheus can read."""
    async with served.client.get("/metrics") as response:
        text = await response.text()
    assert len(list(text_string_to_metric_families(text))) > 20
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def test_requests_are_counted() -> None:
    async def run() -> None:
        runner = FakeRunner()
        async with serving(runner, TgiOptions(max_concurrent_requests=1)) as served:
            body = {"inputs": "Hello", "parameters": {"max_new_tokens": 4}}
            await served.post(body, "/generate")
            await served.post(body, "/generate_stream")
            await served.post({"inputs": ""}, "/generate_stream")
            await served.post({"messages": [{"role": "user", "content": "a"}]}, "/invocations")
            two = {"inputs": "a", "parameters": {"best_of": 2, "do_sample": True}}
            await served.post(two, "/generate")
            runner.fail_step = lambda number: "broken"
            await served.post(body, "/generate_stream")
            samples = await read(served)
        assert samples["tgi_request_count"] == 6
        assert samples["tgi_request_success"] == 2
        for kind in ("validation", "template", "overloaded", "generation"):
            assert samples[f'tgi_request_failure{{err="{kind}"}}'] == 1
        assert samples["tgi_request_duration_count"] == 2
        assert samples["tgi_request_queue_duration_count"] == 2
        assert 0 < samples["tgi_request_queue_duration_sum"] < samples["tgi_request_duration_sum"]
        assert samples["tgi_request_input_length_sum"] == 10
        assert samples["tgi_request_generated_tokens_sum"] == 8
        assert samples["tgi_request_max_new_tokens_count"] == 2
        assert samples["tgi_queue_size"] == samples["tgi_batch_current_size"] == 0
        assert samples["tgi_batch_max_total_tokens"] > 0
        assert samples['lmi_generated_tokens_total{model_name="model"}'] == 8

    asyncio.run(run())


def test_buckets_are_cumulative_and_include_their_bound() -> None:
    histogram = Histogram([1.0, 2.0])
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert histogram.cumulative() == [("1.0", 2), ("2.0", 3), ("+Inf", 4)]
    assert histogram.sum == 12.0
    histogram.observe_all([0.1, 2.0])
    assert histogram.cumulative() == [("1.0", 3), ("2.0", 5), ("+Inf", 6)]
