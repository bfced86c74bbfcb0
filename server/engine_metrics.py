"""The engine's metrics: moments it reports, and its state read at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lmi_core.engine.outputs import FinishReason
from lmi_core.engine.stats import EngineStats, StepRecord

_TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_STEP_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_LABELS = ("model_name",)


class EngineMetrics:
    """An ``EngineObserver`` that fills Prometheus histograms."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(name, text, _LABELS, buckets=buckets, registry=registry)
            return family.labels(model_name)

        self._registry = registry
        self._model_name = model_name
        self._first_token = histogram(
            "lmi_time_to_first_token_seconds", "From arrival to the first token.", _TTFT_BUCKETS
        )
        self._interval = histogram(
            "lmi_inter_token_latency_seconds", "Between two tokens of a choice.", _ITL_BUCKETS
        )
        self._step = histogram(
            "lmi_step_seconds", "From a step's submission to the notice of its end.", _STEP_BUCKETS
        )
        self._native_step = histogram(
            "lmi_native_step_seconds", "The same by the worker's clock.", _STEP_BUCKETS
        )
        finished = Counter(
            "lmi_finished_requests",
            "Requests that ended, by reason.",
            (*_LABELS, "reason"),
            registry=registry,
        )
        self._finished = {
            reason: finished.labels(model_name, "error" if reason is None else str(reason))
            for reason in (*FinishReason, None)
        }

    def on_step(self, step: StepRecord) -> None:
        self._step.observe(step.seconds)
        self._native_step.observe(step.native_seconds)

    def on_first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def on_token_intervals(self, seconds: list[float]) -> None:
        for interval in seconds:
            self._interval.observe(interval)

    def on_finish(self, reason: FinishReason | None) -> None:
        self._finished[reason].inc()

    def read_from(self, stats: Callable[[], EngineStats]) -> None:
        """Also report, at each scrape, what ``stats`` returns then."""
        self._registry.register(_StatsCollector(stats, self._model_name))


class _StatsCollector(Collector):
    def __init__(self, stats: Callable[[], EngineStats], model_name: str) -> None:
        self._stats = stats
        self._labels = [model_name]

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not ask an engine that may not run yet."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield self._gauge("lmi_running_sequences", "In the batch.", stats.num_running)
        yield self._gauge("lmi_waiting_requests", "None of it runs yet.", stats.num_waiting)
        blocks = GaugeMetricFamily(
            "lmi_kv_blocks", "KV blocks by state.", labels=[*_LABELS, "state"]
        )
        for state, num_blocks in (
            ("used", stats.num_used_blocks),
            ("cached", stats.num_cached_blocks),
            ("free", stats.num_free_blocks),
        ):
            blocks.add_metric([*self._labels, state], num_blocks)
        yield blocks
        totals = stats.totals
        for name, text, value in (
            ("lmi_requests", "Requests taken.", totals.num_requests),
            ("lmi_prompt_tokens", "Prompt tokens.", totals.num_prompt_tokens),
            (
                "lmi_cached_prompt_tokens",
                "Prompt tokens whose KV came from the prefix cache.",
                totals.num_cached_tokens,
            ),
            ("lmi_generated_tokens", "Tokens generated.", totals.num_generated_tokens),
            ("lmi_steps", "Steps completed.", totals.num_steps),
            ("lmi_failed_steps", "Steps that failed.", totals.num_failed_steps),
            ("lmi_preemptions", "Sequences preempted.", totals.num_preemptions),
        ):
            yield self._counter(name, text, value)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family
