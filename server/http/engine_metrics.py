"""The engines' metrics: moments they report, and their state read at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

from prometheus_client import CollectorRegistry, Counter
from prometheus_client import Histogram as LabelledHistogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from lmi_core.engine.outputs import FinishReason
from lmi_core.engine.stats import EngineStats, RequestRecord, StepRecord
from lmi_server.http.histogram import Histogram

_TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_STEP_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_QUEUE_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_LENGTH_BUCKETS = tuple(float(1 << i) for i in range(18))
_LABELS = ("model_name",)
_REASONS = {r: "error" if r is None else str(r) for r in (*FinishReason, None)}
_TOTALS = (
    ("lmi_requests", "Requests taken.", "num_requests"),
    ("lmi_prompt_tokens", "Prompt tokens.", "num_prompt_tokens"),
    (
        "lmi_cached_prompt_tokens",
        "Prompt tokens whose KV came from the prefix cache.",
        "num_cached_tokens",
    ),
    ("lmi_generated_tokens", "Tokens generated.", "num_generated_tokens"),
    ("lmi_steps", "Steps completed.", "num_steps"),
    (
        "lmi_read_weight_bytes",
        "Weights held, once a step: experts, input embeddings and draft models too.",
        "num_weight_bytes",
    ),
    ("lmi_failed_steps", "Steps that failed.", "num_failed_steps"),
    ("lmi_preemptions", "Sequences preempted.", "num_preemptions"),
    ("lmi_drafts", "Times that a sequence had draft tokens in a step.", "num_drafts"),
    ("lmi_draft_tokens", "Tokens drafted.", "num_draft_tokens"),
    ("lmi_accepted_draft_tokens", "Draft tokens that were sampled.", "num_accepted_tokens"),
)


class EngineMetrics:
    """The metrics of every engine of a server, labelled by model."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> LabelledHistogram:
            return LabelledHistogram(name, text, _LABELS, buckets=buckets, registry=registry)

        self.first_token = histogram(
            "lmi_time_to_first_token_seconds", "From arrival to the first token.", _TTFT_BUCKETS
        )
        self.request = histogram(
            "lmi_request_seconds", "From arrival to the last token.", _REQUEST_BUCKETS
        )
        self.queue = histogram(
            "lmi_request_queue_seconds", "From arrival to the first step.", _QUEUE_BUCKETS
        )
        self.prompt_length = histogram(
            "lmi_request_prompt_tokens", "Tokens of a request's prompt.", _LENGTH_BUCKETS
        )
        self.output_length = histogram(
            "lmi_request_generated_tokens", "Tokens a request was given.", _LENGTH_BUCKETS
        )
        self.interval = _Intervals()
        registry.register(self.interval)
        self.step = histogram(
            "lmi_step_seconds", "From a step's submission to the notice of its end.", _STEP_BUCKETS
        )
        self.native_step = histogram(
            "lmi_native_step_seconds", "The same by the worker's clock.", _STEP_BUCKETS
        )
        self.finished = Counter(
            "lmi_finished_requests",
            "Requests that ended, by reason.",
            (*_LABELS, "reason"),
            registry=registry,
        )
        self._stats = _StatsCollector()
        registry.register(self._stats)

    def read_from(self, model_name: str, stats: Callable[[], EngineStats]) -> None:
        """Also report, at each scrape, what ``stats`` returns then."""
        self._stats.sources[model_name] = stats

    def forget(self, model_name: str) -> None:
        """Report a model no longer, neither its state nor what it did."""
        self._stats.sources.pop(model_name, None)
        self.interval.histograms.pop(model_name, None)
        families = (self.first_token, self.step, self.native_step, self.request, self.queue)
        for family in (*families, self.prompt_length, self.output_length):
            with suppress(KeyError):
                family.remove(model_name)
        for reason in _REASONS.values():
            with suppress(KeyError):
                self.finished.remove(model_name, reason)


class EngineMeter:
    """An ``EngineObserver`` that fills the histograms of one model."""

    def __init__(self, metrics: EngineMetrics, model_name: str) -> None:
        self._first_token = metrics.first_token.labels(model_name)
        self._interval = metrics.interval.of(model_name)
        self._step = metrics.step.labels(model_name)
        self._native_step = metrics.native_step.labels(model_name)
        self._request = metrics.request.labels(model_name)
        self._queue = metrics.queue.labels(model_name)
        self._prompt_length = metrics.prompt_length.labels(model_name)
        self._output_length = metrics.output_length.labels(model_name)
        self._finished = {
            reason: metrics.finished.labels(model_name, name) for reason, name in _REASONS.items()
        }

    def on_step(self, step: StepRecord) -> None:
        self._step.observe(step.seconds)
        self._native_step.observe(step.native_seconds)

    def on_first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def on_token_intervals(self, seconds: list[float]) -> None:
        self._interval.observe_all(seconds)

    def on_request(self, record: RequestRecord) -> None:
        self._request.observe(record.seconds)
        self._queue.observe(record.queue_seconds)
        self._prompt_length.observe(record.num_prompt_tokens)
        self._output_length.observe(record.num_generated_tokens)

    def on_finish(self, reason: FinishReason | None) -> None:
        self._finished[reason].inc()


class _Intervals(Collector):
    """The one family that is observed per token, which the library's own is too dear for."""

    def __init__(self) -> None:
        self.histograms: dict[str, Histogram] = {}

    def of(self, model_name: str) -> Histogram:
        return self.histograms.setdefault(model_name, Histogram(_ITL_BUCKETS))

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(
            "lmi_inter_token_latency_seconds", "Between two tokens of a choice.", labels=_LABELS
        )
        for model_name, histogram in self.histograms.items():
            family.add_metric([model_name], histogram.cumulative(), histogram.sum)
        yield family


class _StatsCollector(Collector):
    def __init__(self) -> None:
        self.sources: dict[str, Callable[[], EngineStats]] = {}

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not ask an engine that may not run yet."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        states = {name: stats() for name, stats in self.sources.items()}
        if not states:
            return
        running = {name: stats.num_running for name, stats in states.items()}
        waiting = {name: stats.num_waiting for name, stats in states.items()}
        yield _gauge("lmi_running_sequences", "In the batch.", running)
        yield _gauge("lmi_waiting_requests", "None of it runs yet.", waiting)
        usage = {
            name: stats.num_used_blocks / max(1, stats.num_blocks) for name, stats in states.items()
        }
        yield _gauge("lmi_kv_usage_ratio", "Used KV blocks of all.", usage)
        yield _blocks(states)
        for name, text, field in _TOTALS:
            family = CounterMetricFamily(name, text, labels=_LABELS)
            for model_name, stats in states.items():
                family.add_metric([model_name], getattr(stats.totals, field))
            yield family
        yield _by_source("lmi_source_draft_tokens", "Tokens drafted.", "draft", states)
        yield _by_source(
            "lmi_source_accepted_draft_tokens",
            "Draft tokens that were sampled.",
            "accepted",
            states,
        )
        saved = SummaryMetricFamily(
            "lmi_saved_steps",
            "Steps that a sequence was spared, for each step that it had draft tokens in.",
            labels=_LABELS,
        )
        for model_name, stats in states.items():
            totals = stats.totals
            saved.add_metric([model_name], totals.num_drafts, totals.num_accepted_tokens)
        yield saved


def _gauge(name: str, text: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=_LABELS)
    for model_name, value in values.items():
        family.add_metric([model_name], value)
    return family


def _by_source(name: str, text: str, kind: str, states: Mapping[str, EngineStats]) -> Metric:
    """By what drafted them; texts have what grammars and models don't."""
    family = CounterMetricFamily(name, text, labels=[*_LABELS, "source"])
    for model_name, stats in states.items():
        count = {
            source: int(getattr(stats.totals, f"num_{source}_{kind}_tokens"))
            for source in ("grammar", "model")
        }
        count["text"] = getattr(stats.totals, f"num_{kind}_tokens") - sum(count.values())
        for source, value in count.items():
            family.add_metric([model_name, source], value)
    return family


def _blocks(states: Mapping[str, EngineStats]) -> Metric:
    family = GaugeMetricFamily("lmi_kv_blocks", "KV blocks by state.", labels=[*_LABELS, "state"])
    for model_name, stats in states.items():
        family.add_metric([model_name, "used"], stats.num_used_blocks)
        family.add_metric([model_name, "cached"], stats.num_cached_blocks)
        family.add_metric([model_name, "free"], stats.num_free_blocks)
    return family
