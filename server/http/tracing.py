"""OpenTelemetry: spans of calls that generate, made from timestamps once each has ended.

A call has a span of its own and, below it, queue, prefill and decode, named and attributed by the
semantic conventions for generative AI. The loop only notes numbers; a thread makes spans of them
and sends them by OTLP. What a collector doesn't take is dropped.
"""

from __future__ import annotations

import logging
import os
import random
import re
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import MissingExtraError
from lmi_core.version import __version__
from lmi_server.http.metrics import RequestMeter

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

log = logging.getLogger(__name__)

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
"""Version, trace, parent, flags (W3C Trace Context)."""
_INTERVAL_S = 1.0
_CLOSE_S = 2.0
_MAX_WAITING = 8192
_BATCH = 512
_HTTP_PORT, _TRACES = 4318, "/v1/traces"
_OK = 400
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


@dataclass(frozen=True, slots=True)
class EndedCall:
    """What spans are made of; ``ended_ns`` since the epoch, all else by the meter's clock."""

    meter: RequestMeter
    path: str
    status: int
    traceparent: str
    ended_ns: int
    ended_s: float


class Tracer:
    """``note`` is for the event loop's thread; calls wait there for the exporter's."""

    def __init__(self, exporter: SpanExporter, service_name: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._exporter = exporter
        self._resource = Resource.create({"service.name": service_name})
        self._scope = InstrumentationScope("lmi", __version__)
        self._waiting: deque[EndedCall] = deque()
        self._wakes = threading.Event()
        self._is_closing = False
        self.num_dropped = 0
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def note(self, meter: RequestMeter, path: str, status: int, traceparent: str) -> None:
        """A call has ended; one that reached no engine leaves no spans."""
        if not meter.submitted_at:
            return
        if len(self._waiting) >= _MAX_WAITING:
            self.num_dropped += 1
            return
        now = time.perf_counter()
        self._waiting.append(EndedCall(meter, path, status, traceparent, time.time_ns(), now))

    def close(self) -> None:
        """Send what waits, as far as the collector takes it at once."""
        self._is_closing = True
        self._wakes.set()
        self._thread.join(_CLOSE_S)
        self._exporter.shutdown()  # ends its attempts
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while not self._is_closing:
            self._wakes.wait(_INTERVAL_S)
            while self._waiting:
                count = min(_BATCH, len(self._waiting))
                calls = [self._waiting.popleft() for _ in range(count)]
                try:
                    self._exporter.export([span for call in calls for span in self.spans(call)])
                except Exception as error:  # a collector's trouble isn't ours
                    log.debug("%d calls have no spans: %s", count, error)
                    self.num_dropped += count

    def spans(self, call: EndedCall) -> list[ReadableSpan]:
        """Of one call, the parent first; none where the client's own trace isn't sampled."""
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        parent = _TRACEPARENT.fullmatch(call.traceparent)
        if parent is not None and not int(parent[3], 16) & 1:
            return []
        trace_id = int(parent[1], 16) if parent else 0
        trace_id = trace_id or random.getrandbits(128) or 1
        flags = TraceFlags(TraceFlags.SAMPLED)

        def context() -> SpanContext:
            return SpanContext(trace_id, random.getrandbits(64) or 1, False, flags)

        def at(seconds: float) -> int:
            return call.ended_ns - int((call.ended_s - seconds) * 1e9)

        common: dict[str, Any] = {"resource": self._resource, "instrumentation_scope": self._scope}
        meter, own = call.meter, context()
        failed = call.status >= _OK or bool(meter.error)
        whole = ReadableSpan(
            f"{meter.operation} {meter.model}",
            own,
            parent=SpanContext(trace_id, int(parent[2], 16), True, flags) if parent else None,
            attributes=_attributes(call),
            kind=SpanKind.SERVER,
            status=Status(StatusCode.ERROR, meter.error) if failed else Status(StatusCode.UNSET),
            start_time=at(meter.started),
            end_time=call.ended_ns,
            **common,
        )
        queued = meter.submitted_at + meter.queue_seconds
        first = meter.first_at or call.ended_s
        times = (meter.submitted_at, min(queued, first), first, call.ended_s)
        parts = [
            ReadableSpan(
                name, context(), parent=own, start_time=at(begin), end_time=at(end), **common
            )
            for name, begin, end in zip(_PARTS, times, times[1:], strict=False)
        ]
        return [whole, *(parts if meter.first_at else parts[:1])]


_PARTS = ("queue", "prefill", "decode")


def _attributes(call: EndedCall) -> Mapping[str, str | int | float | Sequence[str]]:
    """Names of the semantic conventions; nothing of what was asked or answered."""
    meter, params = call.meter, call.meter.params or SamplingParams()
    given: dict[str, Any] = {
        "gen_ai.operation.name": meter.operation,
        "gen_ai.provider.name": "lmi",
        "gen_ai.request.model": meter.model,
        "gen_ai.response.model": meter.model,
        "gen_ai.response.id": meter.request_id,
        "gen_ai.request.max_tokens": params.max_new_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p if params.top_p != 1 else None,
        "gen_ai.request.top_k": params.top_k or None,
        "gen_ai.request.seed": str(params.seed) if params.seed is not None else None,
        "gen_ai.request.choice.count": params.n if params.n != 1 else None,
        "gen_ai.response.finish_reasons": meter.finish_reasons,
        "gen_ai.usage.input_tokens": meter.num_prompt_tokens,
        "gen_ai.usage.output_tokens": meter.num_generated_tokens,
        "url.path": call.path,
        "http.response.status_code": call.status,
        "error.type": str(call.status) if call.status >= _OK else None,
    }
    return {name: value for name, value in given.items() if value is not None}


def open_tracer(endpoint: str, service_name: str) -> Tracer | None:
    """A tracer that sends to a collector, by HTTP where the endpoint's port or path, or
    OTEL_EXPORTER_OTLP_PROTOCOL, says so, else by gRPC.

    Without the libraries MissingExtraError; None and a warning where only the variables that
    clusters set for all programs name the endpoint.
    """
    try:
        exporter = _http(endpoint) if _is_http(endpoint) else _grpc(endpoint)
        return Tracer(exporter, service_name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("opentelemetry", "grpc"):
            raise
        missing = MissingExtraError("otlp_endpoint", "otel")
        if endpoint not in map(os.environ.get, _ENDPOINTS):
            raise missing from None
        log.warning("calls are not traced to %s: %s", endpoint, missing)
        return None


def _is_http(endpoint: str) -> bool:
    names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    asked = next(filter(None, map(os.environ.get, names)), "")
    if asked:
        return asked.startswith("http")
    return f":{_HTTP_PORT}" in endpoint or endpoint.endswith(_TRACES)


def _http(endpoint: str) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    base = endpoint.rstrip("/")
    return OTLPSpanExporter(base if base.endswith(_TRACES) else base + _TRACES)


def _grpc(endpoint: str) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint, insecure=not endpoint.startswith("https://"))
