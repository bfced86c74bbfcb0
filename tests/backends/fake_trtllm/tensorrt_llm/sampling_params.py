"""Request parameters; names, defaults and checks are TensorRT-LLM's."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class GuidedDecodingParams:
    json: "str | dict | None" = None
    regex: "str | None" = None
    grammar: "str | None" = None
    json_object: bool = False
    structural_tag: "str | None" = None


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    end_id: "int | None" = None
    pad_id: "int | None" = None
    max_tokens: int = 32
    bad: "str | list[str] | None" = None
    bad_token_ids: "list[int] | None" = None
    stop: "str | list[str] | None" = None
    stop_token_ids: "list[int] | None" = None
    include_stop_str_in_output: bool = False
    embedding_bias: object = None
    n: int = 1
    best_of: "int | None" = None
    use_beam_search: bool = False
    top_k: "int | None" = None
    top_p: "float | None" = None
    seed: "int | None" = None
    temperature: "float | None" = None
    min_tokens: "int | None" = None
    repetition_penalty: "float | None" = None
    presence_penalty: "float | None" = None
    frequency_penalty: "float | None" = None
    prompt_ignore_length: "int | None" = None
    length_penalty: "float | None" = None
    no_repeat_ngram_size: "int | None" = None
    min_p: "float | None" = None
    logprobs: "int | None" = None
    prompt_logprobs: "int | None" = None
    return_context_logits: bool = False
    return_generation_logits: bool = False
    guided_decoding: "GuidedDecodingParams | None" = None
    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: "int | None" = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    def __post_init__(self):
        self.best_of = self.best_of or self.n
        if self.best_of > 1 and self.temperature == 0:
            raise ValueError("Greedy decoding in the LLM API does not allow multiple returns")
