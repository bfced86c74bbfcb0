"""The LLM API; each choice counts on from the prompt's last token, two tokens per result.

A result holds everything so far and is about one choice; the reason for which a choice ended is
there with the last one's.
"""

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum

from tensorrt_llm.sampling_params import GuidedDecodingParams, SamplingParams

__all__ = ["LLM", "GuidedDecodingParams", "RequestError", "SamplingParams"]

_ARGUMENTS = frozenset(
    {
        "allreduce_strategy",
        "cuda_graph_config",
        "disable_overlap_scheduler",
        "enable_chunked_prefill",
        "guided_decoding_backend",
        "kv_cache_config",
        "max_batch_size",
        "max_input_len",
        "max_num_tokens",
        "max_seq_len",
        "model_kwargs",
        "moe_config",
        "pipeline_parallel_size",
        "scheduler_config",
        "speculative_config",
    }
)
"""Of the many that there are."""


class RequestError(RuntimeError):
    pass


class CapacitySchedulerPolicy(StrEnum):
    MAX_UTILIZATION = "MAX_UTILIZATION"
    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    STATIC_BATCH = "STATIC_BATCH"


@dataclass(kw_only=True)
class SchedulerConfig:
    capacity_scheduler_policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    context_chunking_policy: "str | None" = None

    def __post_init__(self):
        self.capacity_scheduler_policy = CapacitySchedulerPolicy(self.capacity_scheduler_policy)


@dataclass(kw_only=True)
class KvCacheConfig:
    enable_block_reuse: bool = True
    max_tokens: "int | None" = None
    free_gpu_memory_fraction: "float | None" = 0.9
    host_cache_size: "int | None" = None
    dtype: str = "auto"
    tokens_per_block: int = 32


@dataclass
class Logprob:
    logprob: float
    rank: "int | None" = None


@dataclass
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: "list[int]" = field(default_factory=list)
    cumulative_logprob: "float | None" = None
    logprobs: "list[dict[int, Logprob]]" = field(default_factory=list)
    prompt_logprobs: "list[dict[int, Logprob]]" = field(default_factory=list)
    finish_reason: "str | None" = None
    stop_reason: "int | str | None" = None


class RequestOutput:
    def __init__(self, llm, prompt_token_ids, params):
        self.outputs = [CompletionOutput(i) for i in range(params.n)]
        self.cached_tokens = 0
        self.finished = False
        self._llm = llm
        self._ids = prompt_token_ids
        self._params = params
        self._running = list(range(params.n))
        self._turn = 0
        if params.ignore_eos:
            params.stop_token_ids, params.end_id = None, -1

    def abort(self):
        self._llm.num_aborted += 1

    def __aiter__(self):
        return self

    async def __anext__(self):
        if self.finished:
            raise StopAsyncIteration
        await asyncio.sleep(0)
        if self._llm.failure is not None:
            raise self._llm.failure
        output = self.outputs[self._running[self._turn % len(self._running)]]
        self._turn += 1
        self.cached_tokens = 3
        if self._params.prompt_logprobs is not None and self._turn == 1:
            following = [*self._ids[1:], self._ids[-1] + 1]
            output.prompt_logprobs = [{i: Logprob(-1.5, 9), 7: Logprob(-0.5)} for i in following]
            del output.prompt_logprobs[: self._llm.num_unscored]
        self._grow(output)
        return self

    def _grow(self, output):
        params, reason = self._params, None
        for _ in range(2):
            count = len(output.token_ids) + 1
            token_id = self._ids[-1] + (output.index + 1) * count
            is_end = token_id == params.end_id
            if not (is_end and self._llm.leaves_end_out):
                output.token_ids.append(token_id)
                if params.logprobs is not None:
                    output.logprobs.append({token_id: Logprob(-0.25), 9: Logprob(-3.0)})
            if is_end:
                reason = "stop"
            elif token_id in (params.stop_token_ids or ()):
                reason, output.stop_reason = "stop", token_id
                if not params.include_stop_str_in_output:
                    output.token_ids.pop()
            elif count == params.max_tokens:
                reason = "length"
            if reason is not None:
                self._running.remove(output.index)
                break
        if not self._running:
            self.finished = True
            output.finish_reason = reason


class LLM:
    """``calls``, ``failure`` and what follows are for the tests."""

    made = []
    leaves_end_out = False

    def __init__(
        self,
        model,
        tokenizer=None,
        tokenizer_mode="auto",
        skip_tokenizer_init=False,
        trust_remote_code=False,
        tensor_parallel_size=1,
        dtype="auto",
        revision=None,
        tokenizer_revision=None,
        **kwargs,
    ):
        for key in kwargs:
            if key not in _ARGUMENTS:
                raise ValueError(f"LLM got invalid argument: {key}")
        if "missing" in str(model):
            raise RuntimeError("no such model")
        self.args = {
            "model": model,
            "tensor_parallel_size": tensor_parallel_size,
            "dtype": dtype,
            "trust_remote_code": trust_remote_code,
            **kwargs,
        }
        self.calls = []
        self.failure = None
        self.num_aborted = self.num_unscored = 0
        self.is_shut_down = False
        self.made.append(self)

    def generate_async(
        self,
        inputs,
        sampling_params=None,
        lora_request=None,
        prompt_adapter_request=None,
        streaming=False,
        kv_cache_retention_config=None,
        disaggregated_params=None,
        trace_headers=None,
        scheduling_params=None,
        conversation_params=None,
        cache_salt=None,
        priority=0.5,
    ):
        assert isinstance(sampling_params, SamplingParams)
        assert streaming
        assert 0 <= priority <= 1
        if len(inputs) > self.args.get("max_num_tokens", 8192):
            raise RequestError("The sum of prompt length should not exceed max_num_tokens")
        self.calls.append((inputs, sampling_params, cache_salt, priority))
        return RequestOutput(self, inputs, sampling_params)

    def shutdown(self):
        self.is_shut_down = True
