"""Prometheus metrics: what requests experience, and the engine's state read at each scrape."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from lmi_core.engine.outputs import TokenEvent

CONTENT_TYPE = CONTENT_TYPE_LATEST

_TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_LATENCY_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_LAG_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


class Metrics:
    """All metrics of one server, in a registry of their own."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        labels = ("model_name",)
        self._requests = Counter(
            "lmi_requests", "Answered requests by status.", ("status",), registry=self.registry
        )

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, labels, registry=self.registry).labels(model_name)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(name, text, labels, buckets=buckets, registry=self.registry)
            return family.labels(model_name)

        self.prompt_tokens = counter("lmi_prompt_tokens", "Prompt tokens of started requests.")
        self.generated_tokens = counter("lmi_generated_tokens", "Tokens generated.")
        self.cached_tokens = counter(
            "lmi_cached_prompt_tokens", "Prompt tokens whose KV came from the prefix cache."
        )
        self.time_to_first_token = histogram(
            "lmi_time_to_first_token_seconds", "From the request to its first token.", _TTFT_BUCKETS
        )
        self.inter_token_latency = histogram(
            "lmi_inter_token_latency_seconds", "Between two tokens of a request.", _ITL_BUCKETS
        )
        self.request_latency = histogram(
            "lmi_request_latency_seconds", "From the request to its end.", _LATENCY_BUCKETS
        )
        self.loop_lag = histogram(
            "lmi_event_loop_lag_seconds",
            "How late the event loop runs what is due, sampled while requests run.",
            _LAG_BUCKETS,
        )
        self.in_flight = Gauge(
            "lmi_requests_in_flight", "Requests inside the server.", registry=self.registry
        )

    def count_answer(self, status: int) -> None:
        self._requests.labels(str(status)).inc()

    def render(self) -> bytes:
        return generate_latest(self.registry)


class RequestMeter:
    """Times one call's tokens."""

    __slots__ = (
        "_last",
        "_metrics",
        "num_generated_tokens",
        "num_prompt_tokens",
        "request_id",
        "started",
    )

    def __init__(self, metrics: Metrics, request_id: str) -> None:
        self._metrics = metrics
        self.started = time.perf_counter()
        self._last: dict[tuple[str, int], float] = {}
        self.request_id = request_id
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0

    def observe(self, events: Sequence[TokenEvent]) -> None:
        """Note events that arrived together."""
        now = time.perf_counter()
        num_tokens = 0
        for event in events:
            if event.prompt is not None:
                continue
            num_tokens += 1
            key = (event.request_id, event.choice)
            last = self._last.get(key)
            if last is None:
                self._first(event, now)
            else:
                self._metrics.inter_token_latency.observe(now - last)
            self._last[key] = now
        self.num_generated_tokens += num_tokens
        self._metrics.generated_tokens.inc(num_tokens)

    def _first(self, event: TokenEvent, now: float) -> None:
        self._metrics.time_to_first_token.observe(now - self.started)
        if event.choice == 0:
            self.num_prompt_tokens += event.num_prompt_tokens
            self._metrics.prompt_tokens.inc(event.num_prompt_tokens)
            self._metrics.cached_tokens.inc(event.num_cached_tokens)

    def finish(self, status: int) -> float:
        """Count the answer; returns how many seconds it took."""
        seconds = time.perf_counter() - self.started
        self._metrics.request_latency.observe(seconds)
        self._metrics.count_answer(status)
        return seconds


class LoopLag:
    """Samples how late the event loop is, only while ``busy`` says that there is work."""

    _INTERVAL_S = 0.1

    def __init__(self, metrics: Metrics, busy: Callable[[], bool]) -> None:
        self._metrics = metrics
        self._busy = busy
        self._armed = False

    def wake(self) -> None:
        if not self._armed:
            self._arm()

    def _arm(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + self._INTERVAL_S
        self._armed = True
        loop.call_at(due, self._sample, loop, due)

    def _sample(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        self._metrics.loop_lag.observe(max(0.0, loop.time() - due))
        self._armed = False
        if self._busy():
            self._arm()
