"""LMI's generation parameters as the engine's sampling parameters (format reference, 4.2, 4.3)."""

from __future__ import annotations

from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import UserError
from lmi_core.structured.grammar import Grammar
from lmi_server.dialects.grammar_fields import GUIDED_FIELDS, grammar_of
from lmi_server.dialects.lmi.output import Answer
from lmi_server.dialects.lmi.schema import LmiParameters

_NUM_CHOICES_MAX = 128


def num_choices(parameters: LmiParameters) -> int:
    """How many sequences to return: without ``n`` all of ``best_of``, as LMI 0.29 does."""
    n, best_of = parameters.n, parameters.best_of
    choices = next((value for value in (n, best_of) if value is not None), 1)
    if not 1 <= choices <= _NUM_CHOICES_MAX:
        raise UserError(
            f"n must be between 1 and {_NUM_CHOICES_MAX}, got {choices}", field="parameters.n"
        )
    return choices


def num_candidates(parameters: LmiParameters) -> int:
    """How many sequences to generate; the best ``n`` of ``best_of`` are returned."""
    choices, best_of = num_choices(parameters), parameters.best_of
    if best_of is None or choices <= best_of <= _NUM_CHOICES_MAX:
        return best_of or choices
    raise UserError(
        f"parameters.best_of must be between n ({choices}) and {_NUM_CHOICES_MAX}, got {best_of}",
        field="parameters.best_of",
    )


def sampling_params(
    parameters: LmiParameters, answer: Answer, *, shows_tokens: bool
) -> SamplingParams:
    """``shows_tokens``: the response names tokens, so that their log-probabilities are needed."""
    stop = (parameters.stop,) if isinstance(parameters.stop, str) else tuple(parameters.stop)
    logprobs = max(
        _count("top_n_tokens", parameters.top_n_tokens), _count("logprobs", parameters.logprobs)
    )
    least, most = parameters.min_tokens, parameters.max_new_tokens
    if most > 0 and not 0 <= least <= most:
        raise UserError(
            f"parameters.min_tokens must be between 0 and max_new_tokens ({most}), got {least}",
            field="parameters.min_tokens",
        )
    prompt_logprobs = parameters.prompt_logprobs
    if answer.prompt_tokens and prompt_logprobs is None:
        prompt_logprobs = 0
    return SamplingParams(
        max_new_tokens=parameters.max_new_tokens,
        min_new_tokens=parameters.min_tokens,
        temperature=_temperature(parameters),
        top_k=0 if parameters.top_k in (None, -1) else parameters.top_k or 0,
        top_p=1.0 if parameters.top_p is None else parameters.top_p,
        min_p=parameters.min_p or 0.0,
        typical_p=1.0 if parameters.typical_p is None else parameters.typical_p,
        repetition_penalty=parameters.repetition_penalty,
        presence_penalty=parameters.presence_penalty,
        frequency_penalty=parameters.frequency_penalty,
        seed=_seed(parameters.seed),
        n=answer.num_candidates,
        stop=(*parameters.stop_sequences, *stop),
        include_stop=parameters.include_stop_str_in_output,
        stop_token_ids=tuple(parameters.stop_token_ids),
        ignore_eos=parameters.ignore_eos_token or parameters.ignore_eos,
        logprobs=logprobs if shows_tokens or answer.num_candidates > 1 else None,
        prompt_logprobs=prompt_logprobs,
        skip_special_tokens=parameters.skip_special_tokens,
        grammar=_grammar(parameters),
    )


def _grammar(parameters: LmiParameters) -> Grammar | None:
    names = ("response_format", "structured_outputs", *GUIDED_FIELDS)
    return grammar_of({name: getattr(parameters, name) for name in names})


def _count(name: str, value: int | None) -> int:
    """A number that a request need not show; 0 when absent."""
    if value is not None and value < 0:
        raise UserError(
            f"parameters.{name} must be at least 0, got {value}", field=f"parameters.{name}"
        )
    return value or 0


def _temperature(parameters: LmiParameters) -> float:
    """0 unless the request samples; without do_sample, sampling values ask for it."""
    temperature = parameters.temperature
    if temperature is not None and temperature < 0:
        raise UserError(
            f"parameters.temperature must be at least 0, got {temperature:g}",
            field="parameters.temperature",
        )
    p = parameters
    sampling_values = (temperature, p.top_k, p.top_p, p.min_p, p.typical_p)
    do_sample = parameters.do_sample
    if do_sample is None:
        do_sample = any(value is not None for value in sampling_values)
    if not do_sample:
        return 0.0
    return 1.0 if temperature is None else temperature


def _seed(seed: int | str | None) -> int | None:
    if seed is None or isinstance(seed, int):
        return seed
    if seed.isdecimal() and len(seed) <= 20:
        return int(seed)
    raise UserError(f"parameters.seed must be an integer, got {seed[:40]!r}", field="seed")


def truncate(parameters: LmiParameters) -> int | None:
    """How many of the prompt's last tokens to keep; None: all."""
    if parameters.truncate is not None and parameters.truncate < 1:
        raise UserError(
            f"parameters.truncate must be at least 1, got {parameters.truncate}",
            field="parameters.truncate",
        )
    return parameters.truncate
