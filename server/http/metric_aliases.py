"""Our metrics again under the names of other servers, for the boards and autoscalers people have.

Sources: vLLM's production metrics, which the Kubernetes inference gateway's model-server protocol
asks for, text-generation-inference's metrics, and DJL-Serving's PrometheusExporter.java, whose
times are histograms as from 0.29.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

ALIASES = {
    "vllm": {
        "vllm:num_requests_running": "lmi_running_sequences",
        "vllm:num_requests_waiting": "lmi_waiting_requests",
        "vllm:kv_cache_usage_perc": "lmi_kv_usage_ratio",
        "vllm:gpu_cache_usage_perc": "lmi_kv_usage_ratio",
        "vllm:prompt_tokens": "lmi_prompt_tokens",
        "vllm:generation_tokens": "lmi_generated_tokens",
        "vllm:prefix_cache_queries": "lmi_prompt_tokens",
        "vllm:prefix_cache_hits": "lmi_cached_prompt_tokens",
        "vllm:num_preemptions": "lmi_preemptions",
        "vllm:spec_decode_num_drafts": "lmi_drafts",
        "vllm:spec_decode_num_draft_tokens": "lmi_draft_tokens",
        "vllm:spec_decode_num_accepted_tokens": "lmi_accepted_draft_tokens",
        "vllm:request_success": "lmi_finished_requests",
        "vllm:time_to_first_token_seconds": "lmi_time_to_first_token_seconds",
        "vllm:inter_token_latency_seconds": "lmi_inter_token_latency_seconds",
        "vllm:time_per_output_token_seconds": "lmi_inter_token_latency_seconds",
        "vllm:e2e_request_latency_seconds": "lmi_request_seconds",
        "vllm:request_queue_time_seconds": "lmi_request_queue_seconds",
        "vllm:request_prompt_tokens": "lmi_request_prompt_tokens",
        "vllm:request_generation_tokens": "lmi_request_generated_tokens",
    },
    "tgi": {
        "tgi_queue_size": "lmi_waiting_requests",
        "tgi_batch_current_size": "lmi_running_sequences",
        "tgi_request_duration": "lmi_request_seconds",
        "tgi_request_queue_duration": "lmi_request_queue_seconds",
        "tgi_request_input_length": "lmi_request_prompt_tokens",
        "tgi_request_generated_tokens": "lmi_request_generated_tokens",
        "tgi_request_skipped_tokens": "lmi_saved_steps",
    },
    "djl": {
        "QueueTime": "lmi_request_queue_seconds",
        "RequestLatency": "lmi_request_seconds",
        "RollingBatchSize": "lmi_running_sequences",
        **{f"Response_{kind}XX": "lmi_http_requests" for kind in "245"},
    },
}
"""System -> their name of a family -> ours. A counter's samples end in _total in both."""

_LABELS = {"vllm": {"reason": "finished_reason"}, "tgi": {}, "djl": {"model_name": "Model"}}
_IN_MICROSECONDS = ("QueueTime", "RequestLatency")
_RESPONSES = "Response_"
_REASONS = {"eos_token": "stop", "stop_sequence": "stop"}
"""What vLLM calls the reasons that it has, too."""


class MetricAliases(Collector):
    """The families of a registry that other systems have, too; registered in none itself."""

    def __init__(self, registry: CollectorRegistry, systems: Sequence[str]) -> None:
        self._registry = registry
        self._systems = systems

    def collect(self) -> Iterator[Metric]:
        ours = {metric.name: metric for metric in self._registry.collect()}
        yield from ours.values()
        for system in self._systems:
            for theirs, name in ALIASES[system].items():
                if name not in ours:
                    continue
                if theirs.startswith(_RESPONSES):
                    yield _responses(ours[name], theirs)
                else:
                    yield _renamed(ours[name], theirs, _LABELS[system])


def _renamed(metric: Metric, name: str, labels: dict[str, str]) -> Metric:
    alias = Metric(name, metric.documentation, metric.type)
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in metric.samples:
        if sample.name.endswith("_created"):
            continue
        own = name + sample.name.removeprefix(metric.name)
        named = {
            labels.get(k, k): _REASONS.get(v, v) if labels else v for k, v in sample.labels.items()
        }
        key = (own, tuple(named.items()))
        value = sample.value
        if name in _IN_MICROSECONDS:
            named, value = _in_microseconds(own, named, value)
            key = (own, tuple(named.items()))
        # Two of our reasons may be one of theirs.
        sums[key] = sums.get(key, 0.0) + value
    alias.samples = [Sample(own, dict(named), value) for (own, named), value in sums.items()]
    return alias


def _in_microseconds(
    sample: str, labels: dict[str, str], value: float
) -> tuple[dict[str, str], float]:
    """A histogram's sum and bounds in microseconds; its counts are what they are."""
    if labels.get("le", "+Inf") != "+Inf":
        labels = {**labels, "le": f"{float(labels['le']) * 1e6:.1f}"}
    return labels, value * 1e6 if sample.endswith("_sum") else value


def _responses(metric: Metric, name: str) -> Metric:
    """The answers whose status begins with the digit in a name as ``Response_2XX``."""
    alias = Metric(name, metric.documentation, metric.type)
    kind = name.removeprefix(_RESPONSES)[0]
    answers = [s for s in metric.samples if s.name.endswith("_total")]
    value = sum(s.value for s in answers if s.labels["status"].startswith(kind))
    alias.samples = [Sample(f"{name}_total", {"Host": platform.node()}, value)]
    return alias
