"""TGI's metrics of requests, under its names (its docs/source/reference/metrics.md).

Its counters have no ``_total``, which the Prometheus library insists on; so the text is our own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from lmi_core.engine.stats import EngineInfo, EngineStats
from lmi_core.errors import CapacityError, LmiError, UserError
from lmi_server.dialects.tgi.errors import IncompleteGeneration, TgiError
from lmi_server.http.histogram import Histogram

_DURATION_BUCKETS = [0.00015 * 1.5**i for i in range(35)]
_NUM_LENGTH_BUCKETS = 100
_DURATIONS = {
    "duration": "From a request's arrival to the end of its answer.",
    "validation_duration": "Checking and tokenizing.",
    "queue_duration": "From the end of validation to the start of the first step.",
    "inference_duration": "From the start of the first step to the end of the answer.",
    "mean_time_per_token_duration": "The inference's time over its tokens.",
}
_LENGTHS = {
    "input_length": "Tokens of prompts.",
    "max_new_tokens": "Most tokens that requests allowed.",
    "generated_tokens": "Tokens generated.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One answered request."""

    seconds: float
    validation_seconds: float
    queue_seconds: float
    num_prompt_tokens: int
    max_new_tokens: int
    num_generated_tokens: int


class TgiMetrics:
    """Counts requests of TGI's routes; the engine's state is read at each scrape."""

    def __init__(self) -> None:
        self._num_requests = 0
        self._num_successes = 0
        self._failures: Counter[str] = Counter()
        self._durations = {name: Histogram(_DURATION_BUCKETS) for name in _DURATIONS}
        self._lengths: dict[str, Histogram] = {}

    def begin(self) -> None:
        """A request came, right or wrong."""
        self._num_requests += 1

    def fail(self, error: BaseException) -> None:
        self._failures[_kind(error)] += 1

    def succeed(self, record: RequestRecord, info: EngineInfo) -> None:
        self._num_successes += 1
        waited = record.validation_seconds + record.queue_seconds
        inference = max(0.0, record.seconds - waited)
        durations = self._durations
        durations["duration"].observe(record.seconds)
        durations["validation_duration"].observe(record.validation_seconds)
        durations["queue_duration"].observe(record.queue_seconds)
        durations["inference_duration"].observe(inference)
        durations["mean_time_per_token_duration"].observe(
            inference / max(1, record.num_generated_tokens)
        )
        lengths = self._lengths or self._begin_lengths(info)
        lengths["input_length"].observe(record.num_prompt_tokens)
        lengths["max_new_tokens"].observe(record.max_new_tokens)
        lengths["generated_tokens"].observe(record.num_generated_tokens)

    def render(self, info: EngineInfo, stats: EngineStats) -> bytes:
        """Prometheus' text format."""
        return "".join(f"{line}\n" for line in self._lines(info, stats)).encode()

    def _lines(self, info: EngineInfo, stats: EngineStats) -> Iterator[str]:
        yield from _single("request_count", "counter", "Requests.", self._num_requests)
        yield from _single("request_success", "counter", "Answered ones.", self._num_successes)
        yield from _head("request_failure", "counter", "Failed requests by reason.")
        for kind, number in sorted(self._failures.items()):
            yield f'tgi_request_failure{{err="{kind}"}} {number}'
        for name, text in _DURATIONS.items():
            yield from _histogram(self._durations[name], f"request_{name}", text)
        lengths = self._lengths or self._begin_lengths(info)
        for name, text in _LENGTHS.items():
            yield from _histogram(lengths[name], f"request_{name}", text)
        runner = info.runner
        for name, text, value in (
            ("queue_size", "Requests that wait.", stats.num_waiting),
            ("batch_current_size", "Sequences that run.", stats.num_running),
            (
                "batch_current_max_tokens",
                "Tokens that the blocks in use hold at most.",
                stats.num_used_blocks * runner.block_size,
            ),
            (
                "batch_max_total_tokens",
                "Tokens that all blocks hold at most.",
                runner.num_blocks * runner.block_size,
            ),
        ):
            yield from _single(name, "gauge", text, value)

    def _begin_lengths(self, info: EngineInfo) -> dict[str, Histogram]:
        """Their buckets depend on the engine's limits, which are known once it runs."""
        for name in _LENGTHS:
            top = info.max_prompt_tokens if name == "input_length" else info.max_total_tokens
            step = top / _NUM_LENGTH_BUCKETS
            self._lengths[name] = Histogram([step * (i + 1) for i in range(_NUM_LENGTH_BUCKETS)])
        return self._lengths


def _histogram(histogram: Histogram, name: str, text: str) -> Iterator[str]:
    yield from _head(name, "histogram", text)
    buckets = histogram.cumulative()
    for bound, count in buckets:
        yield f'tgi_{name}_bucket{{le="{bound}"}} {count}'
    yield f"tgi_{name}_sum {histogram.sum}"
    yield f"tgi_{name}_count {buckets[-1][1]}"


def _head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP tgi_{name} {text}"
    yield f"# TYPE tgi_{name} {kind}"


def _single(name: str, kind: str, text: str, value: float) -> Iterator[str]:
    yield from _head(name, kind, text)
    yield f"tgi_{name} {value}"


def _kind(error: BaseException) -> str:
    match error:
        case TgiError(error_type="template_error"):
            return "template"
        case CapacityError():
            return "overloaded"
        case UserError() | TgiError():
            return "validation"
        case IncompleteGeneration():
            return "incomplete"
        case LmiError():
            return "generation"
        case _:
            return "dropped"
