"""Spans of calls, as a collector gets them."""

from __future__ import annotations

import asyncio
import http.server
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from lmi_core.errors import MissingExtraError
from lmi_server.http.metrics import Metrics
from lmi_server.http.tracing import open_tracer
from tests.engine.fake_runner import FakeRunner
from tests.engine.harness import make_engine
from tests.server.configured import configured
from tests.server.harness import serving_backend

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector(http.server.ThreadingHTTPServer):
    """Keeps what is posted to it, as OTLP has it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[Any] = []

    @property
    def spans(self) -> list[Any]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

        assert isinstance(self.server, Collector)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.path == "/v1/traces"
        self.server.requests.append(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(collector: Collector, *calls: tuple[str, dict[str, Any], str]) -> None:
    """Answer calls (path, body, traceparent) of a server that is configured by its flags."""
    endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    options = configured(f"otlp_endpoint={endpoint}", "otlp_service_name=mine")

    async def run() -> None:
        async with (
            make_engine(FakeRunner(), served_model_name="m") as engine,
            serving_backend(engine, Metrics(), **options) as served,
        ):
            for path, body, traceparent in calls:
                await served.post(body, path, headers={"traceparent": traceparent})
            await served.ask("GET", "/health")
            await asyncio.to_thread(served.models.tracer.close)

    asyncio.run(run())


def plain(attributes: Any) -> dict[str, Any]:
    found = {}
    for each in attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        is_list = kind == "array_value"
        found[each.key] = [v.string_value for v in value.values] if is_list else value
    return found


BODY = {"prompt": "hello", "max_tokens": 4, "temperature": 0.5, "seed": 7, "ignore_eos": True}


@pytest.mark.parametrize("streams", [False, True])
def test_spans_reach_a_collector(collector: Collector, streams: bool) -> None:
    ask(collector, ("/v1/completions", {**BODY, "stream": streams}, f"00-{TRACE}-{PARENT}-01"))
    (resource,) = (each.resource for r in collector.requests for each in r.resource_spans)
    assert plain(resource.attributes)["service.name"] == "mine"
    whole, *parts = collector.spans
    assert whole.name == "text_completion m"
    assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (TRACE, PARENT)
    assert [part.name for part in parts] == ["queue", "prefill", "decode"]
    for part in parts:
        assert (part.trace_id, part.parent_span_id) == (whole.trace_id, whole.span_id)
    assert len({span.span_id for span in collector.spans}) == 4
    ends = [whole.start_time_unix_nano]
    for part in parts:
        assert part.start_time_unix_nano >= ends[-1] - 1
        ends.append(part.end_time_unix_nano)
    assert abs(ends[-1] - whole.end_time_unix_nano) <= 1
    attributes = plain(whole.attributes)
    assert attributes["gen_ai.operation.name"] == "text_completion"
    assert attributes["gen_ai.request.max_tokens"] == 4
    assert attributes["gen_ai.request.temperature"] == 0.5
    assert attributes["gen_ai.request.seed"] == "7"
    assert attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert attributes["gen_ai.usage.input_tokens"] == len("hello")
    assert attributes["gen_ai.usage.output_tokens"] == 4
    assert attributes["http.response.status_code"] == 200
    assert "hello" not in str(attributes)


@pytest.mark.parametrize(
    ("traceparent", "num_spans"),
    [
        ("", 4),
        ("nonsense", 4),
        (f"00-{TRACE}-{PARENT}-00", 0),
        (f"cc-{TRACE}-{PARENT}-01-what-later-versions-add", 4),
    ],
)
def test_the_clients_context_decides(
    collector: Collector, traceparent: str, num_spans: int
) -> None:
    ask(collector, ("/v1/completions", BODY, traceparent))
    assert len(collector.spans) == num_spans
    own = {span.trace_id.hex() for span in collector.spans}
    assert len(own) <= 1
    assert (own == {TRACE}) is traceparent.endswith("add")


def test_what_failed_says_so_and_other_routes_have_no_spans(collector: Collector) -> None:
    wrong = {**BODY, "stop_token_ids": [10**9]}
    chat = {"inputs": "hello", "parameters": {"max_new_tokens": 2}}
    ask(collector, ("/v1/completions", wrong, ""), ("/invocations", chat, ""))
    failed, *rest = [span for span in collector.spans if not span.parent_span_id]
    assert plain(failed.attributes)["error.type"] == "400"
    assert "stop_token_ids" in failed.status.message
    assert [span.name for span in rest] == ["text_completion m"]


def test_a_collector_that_is_gone_costs_nobody_an_answer() -> None:
    async def run() -> None:
        options = configured("otlp_endpoint=http://127.0.0.1:9/v1/traces")
        async with (
            make_engine(FakeRunner()) as engine,
            serving_backend(engine, Metrics(), **options) as served,
        ):
            answer = await served.post(BODY, "/v1/completions")
            assert answer.status == 200

    asyncio.run(run())


def test_without_the_libraries_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry.exporter")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(MissingExtraError, match=r"lmi-core\[otel\]"):
        open_tracer("http://localhost:4317", "lmi")
    # A cluster may set it for all programs.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4317")
    assert open_tracer("http://localhost:4317", "lmi") is None
    assert "lmi-core[otel]" in caplog.text
