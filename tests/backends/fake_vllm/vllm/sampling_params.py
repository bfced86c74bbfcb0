"""Request parameters; names and defaults are vLLM's."""

from dataclasses import dataclass
from enum import Enum

from vllm.exceptions import VLLMValidationError


class RequestOutputKind(Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass
class StructuredOutputsParams:
    json: "str | dict | None" = None
    regex: "str | None" = None
    choice: "list[str] | None" = None
    grammar: "str | None" = None


@dataclass
class SamplingParams:
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: "int | None" = None
    stop_token_ids: "list[int] | None" = None
    ignore_eos: bool = False
    max_tokens: "int | None" = 16
    min_tokens: int = 0
    logprobs: "int | None" = None
    prompt_logprobs: "int | None" = None
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: "StructuredOutputsParams | None" = None
    logit_bias: "dict[int, float] | None" = None
    allowed_token_ids: "list[int] | None" = None

    def __post_init__(self):
        if self.repetition_penalty > 2:
            raise VLLMValidationError("repetition_penalty must be in (0, 2]")
