"""Prometheus metrics: what requests experience, and the engine's state read at each scrape."""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import Callable, Iterator, Sequence

from aiohttp import web
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from lmi_core.engine.outputs import TokenEvent
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.version import __version__
from lmi_server.http.engine_metrics import EngineMeter, EngineMetrics
from lmi_server.http.metric_aliases import MetricAliases

CONTENT_TYPE = CONTENT_TYPE_LATEST

_LATENCY_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_SAMPLES_PER_TURN = 256
_LAG_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


class Metrics:
    """All metrics of one server, in a registry of their own."""

    def __init__(self, aliases: Sequence[str] = ()) -> None:
        """``aliases``: systems whose names the metrics have, too (``metric_aliases.ALIASES``)."""
        self.registry = CollectorRegistry()
        self._scraping = asyncio.Lock()
        self._source: Collector = self.registry
        if aliases:
            self._source = MetricAliases(self.registry, aliases)
        self.engines = EngineMetrics(self.registry)
        self._requests = Counter(
            "lmi_http_requests", "Answered requests.", ("status",), registry=self.registry
        )
        self._by_status: dict[int, Counter] = {}
        self._latency = Histogram(
            "lmi_http_request_seconds",
            "From a request's headers to the end of its answer.",
            buckets=_LATENCY_BUCKETS,
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "lmi_http_requests_in_flight", "Requests inside the server.", registry=self.registry
        )
        build = Gauge(
            "lmi_build_info", "1, with what runs.", ("version", "python"), registry=self.registry
        )
        build.labels(__version__, platform.python_version()).set(1)
        self.loop_lag = Histogram(
            "lmi_event_loop_lag_seconds",
            "How late the event loop runs what is due, sampled while requests run.",
            buckets=_LAG_BUCKETS,
            registry=self.registry,
        )

    def observer(self, model_name: str) -> EngineMeter:
        """To be given to a model's engine as its observer."""
        return EngineMeter(self.engines, model_name)

    def count_answer(self, status: int, seconds: float) -> None:
        counter = self._by_status.get(status)
        if counter is None:
            counter = self._by_status[status] = self._requests.labels(str(status))
        counter.inc()
        self._latency.observe(seconds)

    async def scrape(self, names: Sequence[str] = ()) -> bytes:
        """All metrics in Prometheus' text form, or those of some names: some in each turn of the
        loop, for one scrape at a time, since many models have many."""
        source = _Some(self._source, frozenset(names)) if names else self._source
        pieces: list[bytes] = []
        num_samples = 0
        async with self._scraping:
            for metric in source.collect():
                pieces.append(generate_latest(_One(metric)))
                num_samples += len(metric.samples)
                if num_samples >= _SAMPLES_PER_TURN:
                    num_samples = 0
                    await asyncio.sleep(0)
            await asyncio.sleep(0)
        return b"".join(pieces)


class _One(Collector):
    """A metric by itself."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterator[Metric]:
        yield self._metric


class _Some(Collector):
    """The metrics, or the samples of one, that have certain names. (The library's own restriction
    knows no names of collectors that are read at each scrape.)"""

    def __init__(self, registry: Collector, names: frozenset[str]) -> None:
        self._registry = registry
        self._names = names

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            if metric.name not in self._names:
                metric.samples = [s for s in metric.samples if s.name in self._names]
            if metric.samples:
                yield metric


class RequestMeter:
    """What one call cost."""

    __slots__ = (
        "error",
        "finish_reasons",
        "first_at",
        "is_refused",
        "model",
        "num_generated_tokens",
        "num_prompt_tokens",
        "on_events",
        "operation",
        "params",
        "queue_seconds",
        "request_id",
        "started",
        "submitted_at",
    )

    def __init__(self, request_id: str) -> None:
        self.started = time.perf_counter()
        self.request_id = request_id
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.queue_seconds = 0.0
        """The longest that one of its prompts waited to be run."""
        self.error = ""
        """Why it failed or was refused."""
        self.is_refused = False
        """For want of room."""
        self.on_events: Callable[[], None] | None = None
        """Called whenever there are any."""
        self.submitted_at = self.first_at = 0.0
        """By ``started``'s clock, when an engine was asked and when the first token was there; 0:
        never."""
        self.operation = self.model = ""
        self.params: SamplingParams | None = None
        """Of the first of its prompts, None: nothing was generated."""
        self.finish_reasons: tuple[str, ...] = ()

    def submit(self, model: str, requests: Sequence[GenerationRequest], prompt_field: str) -> None:
        """An engine is asked now."""
        self.submitted_at = time.perf_counter()
        self.model, self.operation = model, "embeddings"
        if requests and requests[0].pooling is None:
            self.params = requests[0].params
            is_chat = prompt_field in ("messages", "input")
            self.operation = "chat" if is_chat else "text_completion"

    def observe(self, events: Sequence[TokenEvent]) -> None:
        if self.on_events is not None:
            self.on_events()
        for event in events:
            if event.prompt is not None:
                continue
            is_pooled = event.pooled is not None
            if is_pooled or (event.num_generated_tokens == 1 and event.choice == 0):
                self.num_prompt_tokens += event.num_prompt_tokens
                self.queue_seconds = max(self.queue_seconds, event.queue_seconds)
                self.first_at = self.first_at or time.perf_counter()
            if event.finish_reason is not None:
                self.finish_reasons += (str(event.finish_reason),)
            self.num_generated_tokens += not is_pooled

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started


METER = web.RequestKey("meter", RequestMeter)
"""Set for every request before its route answers."""


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
