"""What the bodies of OpenAI's two generating routes share: fields, limits, sampling parameters.

Besides OpenAI's own fields these are the extra ones that clients of open servers send. Fields
whose mechanism isn't there are parsed, so that they can be refused; the rest is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import UserError
from lmi_server.dialects.grammar_fields import RESPONSE_FORMAT, requested_grammar
from lmi_server.dialects.logit_bias import logit_bias
from lmi_server.dialects.openai.output import Answer
from lmi_server.dialects.unknown_fields import shape

_TEMPERATURE_MAX = 2.0
_NUM_CHOICES_MAX = 128
_SEED_BITS = 64


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


WITHIN = shape(
    stream_options=shape(*StreamOptions.__struct_fields__, "include_obfuscation"),
    response_format=RESPONSE_FORMAT,
    tool_choice=shape(
        "type", function=shape("name"), custom=shape("name"), allowed_tools=shape("mode", "tools")
    ),
)
"""What the objects in a body may have; chat templates get messages and tools whole."""


class OpenAIBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of both routes; null counts as absent."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    best_of: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    cache_salt: str | None = None
    priority: int | None = None
    max_queue_s: float | None = None
    prompt_logprobs: int | None = None
    bad_words: list[str] | None = None
    no_repeat_ngram_size: int | None = None
    allowed_token_ids: list[int] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[Any] | None = None
    guided_grammar: str | None = None

    use_beam_search: bool | None = None
    num_beams: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None

    # Parsed so that they can be refused: their mechanism isn't there.
    logits_processors: list[Any] | None = None
    watermark: bool | None = None
    adapter_id: str | None = None

    @property
    def num_choices(self) -> int:
        """How many to return per prompt."""
        return 1 if self.n is None else self.n

    @property
    def num_candidates(self) -> int:
        """How many to generate per prompt; the best of them are returned. Of beams the engine gives
        the best alone."""
        if self.beams > 1:
            return self.num_choices
        return self.num_choices if self.best_of is None else self.best_of

    @property
    def beams(self) -> int:
        """As vLLM counts them for use_beam_search, unless num_beams says it; 1: no beam search."""
        if self.use_beam_search and self.num_beams is None:
            return self.best_of or self.num_choices
        return self.num_beams or 1

    def answer(self, **others: Any) -> Answer:
        """What its answer's objects share; ``others``: what doesn't follow from the body alone."""
        options = self.stream_options or StreamOptions()
        return Answer(
            usage=bool(options.include_usage),
            usage_in_chunks=bool(options.include_usage and options.continuous_usage_stats),
            token_ids=bool(self.return_token_ids),
            tokens_as_ids=bool(self.return_tokens_as_token_ids),
            prompt_logprobs=self.prompt_logprobs,
            **others,
        )

    @property
    def shows_prompt(self) -> bool:
        """Whether the answer says something of the prompt's tokens."""
        return bool(self.return_token_ids) or self.prompt_logprobs is not None


_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "logits_processors": ([],),
    "watermark": (False,),
}
"""Fields without a mechanism, and the values that ask for what happens anyway."""


def check_common(body: OpenAIBody) -> None:
    """Raise UserError naming the first field that is out of range or can't be served."""
    check_range("num_beams", body.num_beams, 1, None)
    for name, neutral in _NEUTRAL.items():
        value = getattr(body, name)
        if value is not None and value not in neutral:
            raise unavailable(name)
    if body.adapter_id:
        raise UserError(
            "adapter_id is a parameter of TGI's routes; name the adapter in model",
            field="adapter_id",
        )
    check_range("n", body.n, 1, _NUM_CHOICES_MAX)
    check_range("best_of", body.best_of, body.num_choices, _NUM_CHOICES_MAX)
    check_range("max_tokens", body.max_tokens, 0, None)
    check_range("temperature", body.temperature, 0.0, _TEMPERATURE_MAX)
    check_range("presence_penalty", body.presence_penalty, -2.0, 2.0)
    check_range("frequency_penalty", body.frequency_penalty, -2.0, 2.0)
    check_range("truncate_prompt_tokens", body.truncate_prompt_tokens, -1, None)
    if body.truncate_prompt_tokens == 0:
        raise UserError(
            "truncate_prompt_tokens must be at least 1, or -1 for as many as fit, got 0",
            field="truncate_prompt_tokens",
        )
    check_range("prompt_logprobs", body.prompt_logprobs, -1, None)
    check_range("max_queue_s", body.max_queue_s, 0, None)
    if body.prompt_logprobs is not None and body.stream:
        raise UserError(
            "prompt_logprobs are not available when stream is true; leave one of them out",
            field="prompt_logprobs",
        )
    if body.allowed_token_ids is not None and not body.allowed_token_ids:
        raise UserError(
            "allowed_token_ids is empty; name at least one token id, or leave it out",
            field="allowed_token_ids",
        )
    check_range("seed", body.seed, -(2**63), 2**_SEED_BITS - 1)
    for bias in (body.logit_bias or {}).values():
        check_range("logit_bias value", bias, -100.0, 100.0, field="logit_bias")


Body = TypeVar("Body", bound=OpenAIBody)


def with_defaults(body: Body, defaults: Mapping[str, float]) -> Body:
    """``body`` with what it leaves open of sampling; a beam search doesn't sample."""
    if not defaults:
        return body
    has_limit = getattr(body, "max_completion_tokens", None) is not None
    own = [
        name
        for name, is_own in (("temperature", body.beams > 1), ("max_tokens", has_limit))
        if is_own
    ]
    missing = {
        name: value
        for name, value in defaults.items()
        if getattr(body, name) is None and name not in own
    }
    return msgspec.structs.replace(body, **missing)


def common_sampling_params(
    body: OpenAIBody,
    *,
    max_new_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Defaults are OpenAI's: temperature 1, nothing cut off."""
    check_range("min_tokens", body.min_tokens, 0, max_new_tokens or None)
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    skip_special_tokens = body.skip_special_tokens
    temperature = body.temperature
    if temperature is None:
        temperature = 1.0 if body.beams == 1 else 0.0
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        min_new_tokens=body.min_tokens or 0,
        temperature=temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=0 if body.top_k in (None, -1) else body.top_k or 0,
        min_p=body.min_p or 0.0,
        typical_p=1.0 if body.typical_p is None else body.typical_p,
        n=body.num_candidates,
        # Negative seeds are allowed; their bits serve as well.
        seed=None if body.seed is None else body.seed % (1 << _SEED_BITS),
        stop=stop,
        include_stop=bool(body.include_stop_str_in_output),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=_most(prompt_logprobs, body.prompt_logprobs),
        logit_bias=logit_bias(body.logit_bias or {}),
        no_repeat_ngram_size=body.no_repeat_ngram_size or 0,
        bad_words=tuple(body.bad_words or ()),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        skip_special_tokens=True if skip_special_tokens is None else skip_special_tokens,
        allowed_token_ids=None
        if body.allowed_token_ids is None
        else tuple(sorted(set(body.allowed_token_ids))),
        num_beams=body.beams,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        early_stopping=body.early_stopping or False,  # type: ignore[arg-type]
        grammar=requested_grammar(body),
    )


def unavailable(name: str) -> UserError:
    """The refusal of a parameter whose mechanism isn't there."""
    return UserError(
        f"{name} {'are' if name.endswith('s') else 'is'} not available in this version; "
        f"leave {name} out",
        field=name,
    )


def check_range(
    name: str, value: float | None, low: float, high: float | None, *, field: str | None = None
) -> None:
    if value is None or (value >= low and (high is None or value <= high)):
        return
    allowed = f"at least {_number(low)}"
    if high is not None:
        allowed = f"between {_number(low)} and {_number(high)}"
    raise UserError(f"{name} must be {allowed}, got {str(value)[:40]}", field=field or name)


def _most(*counts: int | None) -> int | None:
    """The largest of those that were asked for; -1 stands for all there are."""
    asked = [count for count in counts if count is not None]
    return None if not asked else -1 if -1 in asked else max(asked)


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"
