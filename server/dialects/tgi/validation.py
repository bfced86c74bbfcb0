"""TGI's checks of a request, in its order and words (its router/src/validation.rs).

Each function raises UserError with the message that follows ``Input validation error: ``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from msgspec import UNSET

from lmi_core.errors import UserError
from lmi_core.structured.grammar import Grammar
from lmi_server.dialects.tgi.options import TgiOptions
from lmi_server.dialects.tgi.schema import GenerateParameters
from lmi_server.dialects.unknown_fields import log_ignored

_DEFAULT_MAX_NEW_TOKENS = 100
_SLICE_TOKENS = 1024
"""Release 3 plans at most this many new tokens ahead, and checks only those."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Lengths in tokens that a request must keep to."""

    max_input: int
    max_total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt as checked: its tokens, how many may follow, and what those must keep to."""

    token_ids: tuple[int, ...]
    max_new_tokens: int
    grammar: Grammar | None = None
    has_watermark: bool = False


def check_best_of(parameters: GenerateParameters, options: TgiOptions, *, streams: bool) -> int:
    """Checks that come before a request counts as a running one; returns how many sequences."""
    best_of = 1 if parameters.best_of is None else parameters.best_of
    if streams:
        if best_of != 1:
            _fail("best_of", "`best_of` != 1 is not supported when streaming tokens")
        if parameters.decoder_input_details:
            _fail(
                "decoder_input_details",
                "`decoder_input_details` == true is not supported when streaming tokens",
            )
    if best_of > 1 and options.max_best_of == 1:
        _fail("best_of", "`best_of` != 1 is not allowed for this endpoint")
    if best_of > options.max_best_of:
        _fail(
            "best_of",
            f"`best_of` must be > 0 and <= {options.max_best_of}. Given: {best_of}",
        )
    return max(1, best_of)


def check_parameters(parameters: GenerateParameters, options: TgiOptions) -> None:
    """Checks of values, one after the other; the first that fails is reported."""
    p = parameters
    best_of = p.best_of or 1
    if best_of > 1 and not (
        p.do_sample or any(v is not None for v in (p.temperature, p.top_k, p.top_p, p.typical_p))
    ):
        _fail("best_of", "you must use sampling when `best_of` is > 1")
    _check_positive("temperature", p.temperature)
    _check_positive("repetition_penalty", p.repetition_penalty)
    if p.frequency_penalty is not None and not -2.0 <= p.frequency_penalty <= 2.0:
        _fail("frequency_penalty", "`frequency_penalty` must be >= -2.0 and <= 2.0")
    _check_share("top_p", p.top_p)
    _check_share("typical_p", p.typical_p)
    _check_positive("top_k", p.top_k)
    if p.max_queue_s is not None and p.max_queue_s < 0:
        _fail("max_queue_s", "`max_queue_s` must be >= 0.0")
    if p.max_new_tokens == 0:
        _fail("max_new_tokens", "`max_new_tokens` must be strictly positive")
    if len(p.stop) > options.max_stop_sequences:
        _fail(
            "stop",
            f"`stop` supports up to {options.max_stop_sequences} stop sequences. "
            f"Given: {len(p.stop)}",
        )
    if p.seed is not None and best_of > 1:
        _fail("seed", "`seed` must not be set when `best_of` > 1")
    if p.top_n_tokens is not None and p.top_n_tokens > options.max_top_n_tokens:
        _fail(
            "top_n_tokens",
            f"`top_n_tokens` must be >= 0 and <= {options.max_top_n_tokens}. "
            f"Given: {p.top_n_tokens}",
        )


def check_inputs(inputs: str, parameters: GenerateParameters, limits: Limits) -> None:
    """Checks of the prompt before it is tokenized."""
    if not inputs:
        _fail("inputs", "`inputs` cannot be empty")
    truncate = parameters.truncate
    if truncate is not None and not 0 < truncate <= limits.max_input:
        _fail(
            "truncate",
            f"`truncate` must be strictly positive and less than {limits.max_input}. "
            f"Given: {truncate}",
        )


def check_lengths(
    token_ids: Sequence[int], parameters: GenerateParameters, limits: Limits, version: int
) -> Prompt:
    """Truncate on the left, check lengths, and settle how many tokens may be generated."""
    if parameters.truncate is not None:
        token_ids = token_ids[-parameters.truncate :]
    length = len(token_ids)
    room = max(0, limits.max_total - length)
    asked = parameters.max_new_tokens
    if asked is UNSET:
        asked = _DEFAULT_MAX_NEW_TOKENS if version < 3 else None
    num_new = room if asked is None else asked
    num_checked = min(num_new, _SLICE_TOKENS) if version >= 3 else num_new
    if length + num_checked > limits.max_total:
        _fail(
            "max_new_tokens",
            f"`inputs` tokens + `max_new_tokens` must be <= {limits.max_total}. "
            f"Given: {length} `inputs` tokens and {num_checked} `max_new_tokens`",
        )
    if length > limits.max_input:
        _fail(
            "inputs",
            f"`inputs` must have less than {limits.max_input} tokens. Given: {length}",
        )
    return Prompt(token_ids=tuple(token_ids), max_new_tokens=min(num_new, room))


def wants_watermark(parameters: GenerateParameters, options: TgiOptions) -> bool:
    """Whether to make the watermark; one that is asked for in vain is reported."""
    if parameters.watermark and options.ignores_watermark:
        log_ignored("a request's", ["parameters.watermark"])
    return parameters.watermark and not options.ignores_watermark


def _check_positive(name: str, value: float | None) -> None:
    if value is not None and value <= 0:
        _fail(name, f"`{name}` must be strictly positive")


def _check_share(name: str, value: float | None) -> None:
    if value is not None and not 0.0 < value < 1.0:
        _fail(name, f"`{name}` must be > 0.0 and < 1.0")


def _fail(field: str, message: str) -> NoReturn:
    raise UserError(message, field=field)
