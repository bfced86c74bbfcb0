"""LMI's generation parameters as the engine's sampling parameters (djl_python/rolling_batch)."""

from __future__ import annotations

import msgspec

from lmi_core.engine.logits_processors import LogitsProcessors
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import UserError
from lmi_server.dialects.grammar_fields import requested_grammar
from lmi_server.dialects.lmi.output import Answer
from lmi_server.dialects.lmi.schema import LmiBody, LmiParameters
from lmi_server.dialects.logit_bias import logit_bias

_NUM_CHOICES_MAX = 128
_STRATEGY_TOP_K = 4
"""Of decoding_strategy=sample and contrastive, where a request has none."""
_PENALTY_ALPHA = 0.6
_OF_SAMPLING = ("temperature", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""What contrastive search makes nothing of."""


def num_beams(parameters: LmiParameters) -> int:
    """1: no beam search. ``use_beam_search`` has as many as there are candidates, as LMI 0.29's
    names for it do; UserError for two different numbers."""
    beams, best_of = parameters.num_beams, parameters.best_of
    if beams == 1 and parameters.use_beam_search:
        return best_of or parameters.n or 1
    if beams > 1 and best_of not in (None, beams):
        raise UserError(
            f"parameters.best_of is {best_of}, but parameters.num_beams is {beams}: with beams "
            "both mean the same, leave one of them out",
            field="parameters.best_of",
        )
    return beams


def num_choices(parameters: LmiParameters) -> int:
    """How many sequences to return: without ``n`` all of ``best_of``, or all beams, as LMI 0.29
    does."""
    names = ("n", "num_return_sequences", "best_of")
    name = next((name for name in names if getattr(parameters, name) is not None), "num_beams")
    choices: int = getattr(parameters, name)
    if not 1 <= choices <= _NUM_CHOICES_MAX:
        raise UserError(
            f"parameters.{name} must be between 1 and {_NUM_CHOICES_MAX}, got {choices}",
            field=f"parameters.{name}",
        )
    return choices


def num_candidates(parameters: LmiParameters) -> int:
    """How many sequences to generate; the best ``n`` of ``best_of`` are returned."""
    choices, best_of = num_choices(parameters), parameters.best_of
    if num_beams(parameters) > 1:  # the engine gives the best of them
        return choices
    if best_of is None or choices <= best_of <= _NUM_CHOICES_MAX:
        return best_of or choices
    raise UserError(
        f"parameters.best_of must be between n ({choices}) and {_NUM_CHOICES_MAX}, got {best_of}",
        field="parameters.best_of",
    )


def with_strategy(parameters: LmiParameters, default: str) -> tuple[LmiParameters, tuple[str, ...]]:
    """What a decoding strategy, the request's or the ``default`` one, makes of parameters, and the
    names of those that it ignores; without one they stay as they are (djl_python/seq_scheduler)."""
    strategy = _strategy(parameters, default)
    if not strategy:
        return parameters, ()
    if strategy == "contrastive":
        return _contrastive(parameters)
    do_sample = parameters.do_sample
    if do_sample is None:
        do_sample = strategy == "sample"
    top_k = _STRATEGY_TOP_K if do_sample and parameters.top_k is None else parameters.top_k
    ignored: tuple[str, ...] = ()
    if do_sample and top_k and top_k > 0 and parameters.top_p not in (None, 1.0):
        ignored = ("top_p",)
    top_p = None if ignored else parameters.top_p
    return msgspec.structs.replace(
        parameters, do_sample=do_sample, top_k=top_k, top_p=top_p
    ), ignored


def _strategy(parameters: LmiParameters, default: str) -> str:
    """As requests say it; penalty_alpha alone says it too, as Transformers has it."""
    p, own, alpha = parameters, parameters.decoding_strategy, parameters.penalty_alpha
    wants = own == "contrastive" or bool(alpha)
    other = ""
    if p.do_sample:
        other = "do_sample is true"
    elif num_beams(p) > 1:
        other = f"num_beams is {num_beams(p)}"
    elif own not in (None, "contrastive"):
        other = f"decoding_strategy is {own}"
    if wants and other:
        name = "decoding_strategy" if own == "contrastive" else "penalty_alpha"
        raise UserError(
            f"parameters.{name} asks for contrastive search, but {other}: leave one of them out",
            field=f"parameters.{name}",
        )
    if wants:
        return "contrastive"
    if own is None and other and default == "contrastive":
        return "sample" if p.do_sample else "greedy"
    return own or default


def _contrastive(parameters: LmiParameters) -> tuple[LmiParameters, tuple[str, ...]]:
    """With LMI's defaults, which it has even where a request says otherwise."""
    alpha = _PENALTY_ALPHA if parameters.penalty_alpha is None else parameters.penalty_alpha
    top_k = _STRATEGY_TOP_K if parameters.top_k is None else parameters.top_k
    ignored = [name for name in _OF_SAMPLING if getattr(parameters, name) is not None]
    return msgspec.structs.replace(
        parameters,
        decoding_strategy="contrastive",
        do_sample=False,
        penalty_alpha=alpha,
        top_k=top_k,
        **dict.fromkeys(ignored),
    ), tuple(ignored)


def min_new_tokens(parameters: LmiParameters) -> int:
    """The least number of tokens, by whichever of its names; UserError if it is over the most."""
    p, most = parameters, parameters.max_new_tokens
    least = {"min_length": p.min_length, "min_new_tokens": p.min_new_tokens}
    name, value = max(least.items(), key=lambda item: item[1] or 0)
    if not value:
        name, value = "min_tokens", p.min_tokens
    if most > 0 and not 0 <= value <= most:
        raise UserError(
            f"parameters.{name} must be between 0 and max_new_tokens ({most}), got {value}",
            field=f"parameters.{name}",
        )
    return value


def sampling_params(
    parameters: LmiParameters, answer: Answer, *, shows_tokens: bool
) -> SamplingParams:
    """``shows_tokens``: the response names tokens, so that their log-probabilities are needed."""
    stop = (parameters.stop,) if isinstance(parameters.stop, str) else tuple(parameters.stop)
    logprobs = max(
        _count("top_n_tokens", parameters.top_n_tokens), _count("logprobs", parameters.logprobs)
    )
    prompt_logprobs = parameters.prompt_logprobs
    if answer.prompt_tokens and prompt_logprobs is None:
        prompt_logprobs = 0
    return SamplingParams(
        max_new_tokens=parameters.max_new_tokens,
        min_new_tokens=min_new_tokens(parameters),
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
        no_repeat_ngram_size=parameters.no_repeat_ngram_size,
        bad_words=(*parameters.bad_words, *parameters.bad_sequences),
        bad_words_ids=tuple(map(tuple, parameters.bad_words_ids)),
        banned_token_ids=tuple(parameters.suppress_tokens),
        processors=_processors(parameters),
        logit_bias=logit_bias(parameters.logit_bias),
        penalty_alpha=_penalty_alpha(parameters),
        num_beams=num_beams(parameters),
        length_penalty=parameters.length_penalty,
        early_stopping=parameters.early_stopping,  # type: ignore[arg-type]
        grammar=requested_grammar(parameters),
    )


def _processors(parameters: LmiParameters) -> LogitsProcessors | None:
    """Of those that have no other name; None: there are none."""
    forced_eos = parameters.forced_eos_token_id
    # Of a sequence that is named twice the last bias holds, as in a mapping of theirs.
    biases = {tuple(ids): bias for ids, bias in parameters.sequence_bias}
    asked = LogitsProcessors(
        begin_suppress_tokens=tuple(parameters.begin_suppress_tokens),
        forced_bos_token_id=parameters.forced_bos_token_id,
        forced_eos_token_id=(forced_eos,) if isinstance(forced_eos, int) else tuple(forced_eos),
        encoder_no_repeat_ngram_size=parameters.encoder_no_repeat_ngram_size,
        sequence_bias=tuple(biases.items()),
        exponential_decay_length_penalty=parameters.exponential_decay_length_penalty,
        encoder_repetition_penalty=parameters.encoder_repetition_penalty,
        epsilon_cutoff=parameters.epsilon_cutoff or 0.0,
        eta_cutoff=parameters.eta_cutoff or 0.0,
    )
    return None if asked == LogitsProcessors() else asked


def _penalty_alpha(parameters: LmiParameters) -> float | None:
    return parameters.penalty_alpha if parameters.decoding_strategy == "contrastive" else None


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
    do_sample = parameters.do_sample
    if do_sample is None:
        asked = (getattr(parameters, name) for name in ("top_k", *_OF_SAMPLING))
        do_sample = any(value is not None for value in asked)
    if not do_sample:
        return 0.0
    return 1.0 if temperature is None else temperature


def _seed(seed: int | str | None) -> int | None:
    if seed is None or isinstance(seed, int):
        return seed
    if seed.isdecimal() and len(seed) <= 20:
        return int(seed)
    raise UserError(f"parameters.seed must be an integer, got {seed[:40]!r}", field="seed")


def cached_prompt(body: LmiBody, parameters: LmiParameters) -> tuple[str, tuple[str, ...]]:
    """The text in front of the inputs, and the name of one that isn't used
    (scheduler_rolling_batch.py): what prompts begin with is cached whether a request says so or
    not."""
    text = body.cached_prompt or parameters.cached_prompt or ""
    if not text or parameters.use_lru_kv_cache:
        return text, ()
    return "", ("cached_prompt",)


def truncate(parameters: LmiParameters) -> int | None:
    """How many of the prompt's last tokens to keep; None: all."""
    if parameters.truncate is not None and parameters.truncate < 1:
        raise UserError(
            f"parameters.truncate must be at least 1, got {parameters.truncate}",
            field="parameters.truncate",
        )
    return parameters.truncate
