"""The request schema of LMI: the JSON body and its ``parameters``."""

from __future__ import annotations

from typing import Any

import msgspec

from lmi_core.errors import UserError
from lmi_server.dialects.decode import convert, decode_json
from lmi_server.dialects.grammar_fields import RESPONSE_FORMAT
from lmi_server.dialects.unknown_fields import shape, unknown_within


class LmiBody(msgspec.Struct, frozen=True):
    """The body; what isn't named here is ignored, as LMI does."""

    inputs: str | list[str] | None = None
    parameters: dict[str, Any] | None = None
    stream: bool | None = None
    adapters: str | list[str] | None = None
    cached_prompt: str | None = None
    messages: list[Any] | None = None
    prompt: Any = None
    """OpenAI's completion, where there are no ``inputs``."""


class LmiParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Generation parameters: the generic ones, then those that LMI's backends add."""

    do_sample: bool | None = None
    seed: int | str | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0
    max_new_tokens: int = 30
    details: bool | None = None
    return_full_text: bool = False
    stop_sequences: list[str] = []
    decoder_input_details: bool = False
    output_formatter: str | None = None

    min_p: float | None = None
    typical_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    n: int | None = None
    best_of: int | None = None
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    min_tokens: int = 0
    min_new_tokens: int | None = None
    min_length: int | None = None
    no_repeat_ngram_size: int = 0
    bad_words: list[str] = []
    bad_sequences: list[str] = []
    bad_words_ids: list[list[int]] = []
    suppress_tokens: list[int] = []
    begin_suppress_tokens: list[int] = []
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | list[int] = []
    encoder_no_repeat_ngram_size: int = 0
    sequence_bias: list[tuple[list[int], float]] = []
    exponential_decay_length_penalty: tuple[int, float] | None = None
    encoder_repetition_penalty: float = 1.0
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None
    logit_bias: dict[str, float] = {}
    ignore_eos_token: bool = False
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    top_n_tokens: int | None = None
    truncate: int | None = None
    max_queue_s: float | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[Any] | None = None
    guided_grammar: str | None = None

    watermark: bool = False
    decoding_strategy: str | None = None
    cached_prompt: str | None = None
    use_lru_kv_cache: bool = False

    penalty_alpha: float | None = None

    num_beams: int = 1
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    num_return_sequences: int | None = None

    # Parsed so that it can be refused: its mechanism isn't there.
    spaces_between_special_tokens: bool = True


class LmiRequest(LmiBody, frozen=True):
    """The body as documents show it: ``parameters`` are checked after it has been decoded."""

    parameters: LmiParameters | None = None  # type: ignore[assignment]


_WITHIN = shape(response_format=RESPONSE_FORMAT)
_KNOWN = frozenset(LmiParameters.__struct_fields__)
_NEUTRAL = {
    "spaces_between_special_tokens": True,
}
_LEAST = {
    "num_beams": 1,
    "best_of": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "max_queue_s": 0,
}
STRATEGIES = ("greedy", "sample", "contrastive")
_BODY = msgspec.json.Decoder(LmiBody)


def decode_body(body: bytes) -> LmiBody:
    """Decode a JSON body; UserError names the byte or the field at fault."""
    return decode_json(_BODY, body)


def decode_parameters(raw: dict[str, Any]) -> tuple[LmiParameters, tuple[str, ...]]:
    """Parameters and the names of those unknown; null counts as absent.

    Raises UserError for a wrong type and for a parameter whose mechanism isn't available.
    """
    given = {name: value for name, value in raw.items() if value is not None}
    parameters = convert(given, LmiParameters, name="parameters")
    _check_ranges(parameters)
    for name, neutral in _NEUTRAL.items():
        value = getattr(parameters, name)
        if value != neutral:
            keep = "leave it out" if neutral is None else f"leave it out or send {neutral!r}"
            raise UserError(
                f"parameters.{name} is not available in this version (got {value!r}); {keep}",
                field=f"parameters.{name}",
            )
    within = unknown_within(given, _WITHIN)
    return parameters, (*(name for name in given if name not in _KNOWN), *within)


def _check_ranges(parameters: LmiParameters) -> None:
    """Of parameters that the engine doesn't check, since it doesn't have them by these names."""
    strategy = parameters.decoding_strategy
    if strategy is not None and strategy not in STRATEGIES:
        allowed = f"{', '.join(STRATEGIES[:-1])} or {STRATEGIES[-1]}"
        raise UserError(
            f"parameters.decoding_strategy must be {allowed}, got {strategy[:40]!r}",
            field="parameters.decoding_strategy",
        )
    for name, least in _LEAST.items():
        value = getattr(parameters, name)
        if value is not None and value < least:
            field = f"parameters.{name}"
            raise UserError(f"{field} must be at least {least}, got {str(value)[:40]}", field=field)
