"""The engine: each choice counts on from the prompt's last token, two tokens per output."""

import asyncio
from dataclasses import dataclass, field

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

VOCAB_SIZE = 384
EOS_ID = 1


@dataclass
class Logprob:
    logprob: float
    rank: "int | None" = None
    decoded_token: "str | None" = None


@dataclass
class CompletionOutput:
    index: int
    text: str
    token_ids: "list[int]"
    cumulative_logprob: "float | None" = None
    logprobs: "list[dict[int, Logprob]] | None" = None
    finish_reason: "str | None" = None
    stop_reason: "int | str | None" = None


@dataclass
class RequestOutput:
    request_id: str
    prompt_logprobs: "list[dict[int, Logprob] | None] | None"
    outputs: "list[CompletionOutput]"
    finished: bool
    num_cached_tokens: "int | None" = None


@dataclass
class _ModelConfig:
    max_model_len: int
    dtype: str = "torch.float32"
    hf_text_config: object = None

    def get_vocab_size(self):
        return VOCAB_SIZE

    def try_get_generation_config(self):
        return {"eos_token_id": EOS_ID}


@dataclass
class AsyncLLM:
    """``calls`` and ``aborted`` are for the tests."""

    model_config: _ModelConfig
    calls: "list[tuple]" = field(default_factory=list)
    aborted: "list[str]" = field(default_factory=list)
    loras: "dict[int, object]" = field(default_factory=dict)
    lora_requests: list = field(default_factory=list)
    errored: bool = False
    is_shut_down: bool = False

    made = []

    @classmethod
    def from_engine_args(cls, engine_args):
        if "missing" in engine_args.model:
            raise OSError("no such model")
        engine = cls(_ModelConfig(engine_args.max_model_len or 128))
        engine.args = engine_args
        cls.made.append(engine)
        return engine

    def shutdown(self, timeout=None):
        self.is_shut_down = True

    async def add_lora(self, lora_request):
        assert self.args.enable_lora
        if "broken" in lora_request.lora_path:
            raise RuntimeError("Call to add_lora method failed: no adapter there")
        self.loras[lora_request.lora_int_id] = lora_request
        return True

    async def remove_lora(self, lora_id):
        del self.loras[lora_id]
        return True

    async def generate(self, prompt, sampling_params, request_id, *, lora_request=None, priority=0):
        self.lora_requests.append(lora_request)
        assert sampling_params.output_kind is RequestOutputKind.DELTA
        self.calls.append((prompt, sampling_params, request_id, priority))
        ids = prompt["prompt_token_ids"]
        counts = [0] * sampling_params.n
        is_done = [False] * sampling_params.n
        scores = None
        if sampling_params.prompt_logprobs is not None:
            scores = [None, *({i: Logprob(-1.5, 9), 7: Logprob(-0.5)} for i in ids[1:])]
        try:
            while not all(is_done):
                await asyncio.sleep(0)
                if self.errored:
                    raise EngineDeadError("the process ended")
                outputs = []
                for index in range(sampling_params.n):
                    if not is_done[index]:
                        output = self._next(index, ids, counts, sampling_params)
                        is_done[index] = output.finish_reason is not None
                        outputs.append(output)
                yield RequestOutput(request_id, scores, outputs, all(is_done), 3)
                scores = None
        finally:
            if not all(is_done):
                self.aborted.append(request_id)

    def _next(self, index, ids, counts, params):
        output = CompletionOutput(index, "", [])
        while len(output.token_ids) < 2 and output.finish_reason is None:
            token_id = ids[-1] + (index + 1) * (counts[index] + 1)
            counts[index] += 1
            output.token_ids.append(token_id)
            if token_id in (params.stop_token_ids or ()):
                output.finish_reason, output.stop_reason = "stop", token_id
            elif counts[index] == params.max_tokens:
                output.finish_reason = "length"
        if params.logprobs is not None:
            output.logprobs = [{i: Logprob(-0.25), 9: Logprob(-3.0)} for i in output.token_ids]
        return output
