"""The TGI protocol: what a call to text-generation-inference asks of the engine.

Calls are decoded at once, but checked in two steps with the server's own admission between them,
and the second one needs the tokenizer; so its dialect drives it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec
from msgspec import UNSET, UnsetType

from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.sampling_params import SamplingParams
from lmi_server.dialects.base import HttpError, ParsedCall, Renderer
from lmi_server.dialects.logit_bias import logit_bias
from lmi_server.dialects.tgi.events import (
    Answer,
    JsonRenderer,
    SseRenderer,
    Timing,
    error_event,
)
from lmi_server.dialects.tgi.grammar import grammar_of
from lmi_server.dialects.tgi.options import TgiOptions
from lmi_server.dialects.tgi.schema import (
    CompatBody,
    GenerateBody,
    GenerateParameters,
    body_decoder,
)
from lmi_server.dialects.tgi.validation import (
    Limits,
    Prompt,
    check_best_of,
    check_inputs,
    check_lengths,
    check_parameters,
    wants_watermark,
)
from lmi_server.models.loaded_model import LoadedModel

log = logging.getLogger(__name__)

_decode_generate = body_decoder(GenerateBody)
_decode_compat = body_decoder(CompatBody)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One prompt of a call."""

    inputs: str
    parameters: GenerateParameters
    add_special_tokens: bool = True
    shows_logprobs: bool | None = None
    """None: as the parameters say."""
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    model: str = ""
    """What may be an adapter's name; any other is the base model."""


def ignore_text() -> None:
    """Of a call without tools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedCall:
    """A decoded call: what to generate and how to answer."""

    generations: tuple[Generation, ...]
    streams: bool
    render: Callable[[Sequence[Answer]], Renderer]
    render_error: Callable[[Exception, int], bytes] = error_event
    """The end of a stream that failed, in the form of a release."""
    as_list: bool = False
    fallback: Generation | None = None
    """Run instead when the model prefers no tool."""
    on_text: Callable[[], None] = ignore_text
    """Called when it does."""


def check_content_type(content_type: str) -> None:
    """HttpError 415 unless it is JSON."""
    kind = content_type.partition(";")[0].strip().lower()
    is_suffixed = kind.startswith("application/") and kind.endswith("+json")
    if kind != "application/json" and not is_suffixed:
        raise HttpError(
            415,
            "UnsupportedMediaType",
            "Expected request with `Content-Type: application/json`",
        )


def decode_generate(body: bytes, *, streams: bool) -> DecodedCall:
    """A body of ``/generate`` or ``/generate_stream``; HttpError when its shape is wrong."""
    decoded = _decode_generate(body)
    return _generate_call(decoded.inputs, _parameters(decoded.parameters), streams=streams)


def decode_compat(body: bytes) -> DecodedCall:
    """A body of ``/``."""
    return compat_call(_decode_compat(body))


def compat_call(body: CompatBody) -> DecodedCall:
    """``/`` puts the prompt in front of the text unless told otherwise."""
    parameters = _parameters(body.parameters)
    if parameters.return_full_text is None:
        parameters = msgspec.structs.replace(parameters, return_full_text=True)
    return _generate_call(body.inputs, parameters, streams=body.stream, as_list=not body.stream)


def _generate_call(
    inputs: str, parameters: GenerateParameters, *, streams: bool, as_list: bool = False
) -> DecodedCall:
    return DecodedCall(
        generations=(Generation(inputs=inputs, parameters=parameters),),
        streams=streams,
        as_list=as_list,
        render=partial(_of_one, SseRenderer if streams else JsonRenderer),
    )


def _of_one(kind: Callable[[Answer], Renderer], answers: Sequence[Answer]) -> Renderer:
    return kind(answers[0])


def limits_of(model: LoadedModel) -> Limits:
    info = model.info
    max_input = model.options.tgi.max_input_tokens or info.max_prompt_tokens
    return Limits(max_input=min(max_input, info.max_prompt_tokens), max_total=info.max_total_tokens)


def num_sequences(options: TgiOptions, call: DecodedCall) -> int:
    """The checks that come before admission; how many sequences the call runs."""
    return sum(
        check_best_of(generation.parameters, options, streams=call.streams)
        for generation in call.generations
    )


async def check_call(
    model: LoadedModel, call: DecodedCall, *, request_id: str, started_s: float
) -> ParsedCall:
    """The remaining checks, and what to run; UserError names the parameter at fault.

    ``started_s``: when the call came, by ``time.perf_counter``.
    """
    options = model.options.tgi
    prompts = [await _check(model, generation) for generation in call.generations]
    timing = Timing(started_s=started_s, validated_s=time.perf_counter())
    answers = []
    requests: list[GenerationRequest] = []
    for generation, prompt in zip(call.generations, prompts, strict=True):
        answer = _answer(model, call, generation, prompt, timing)
        answers.append(answer)
        adapter = _adapter(model, generation, request_id)
        params = _sampling_params(options, generation, answer, prompt)
        requests += _requests(
            f"{request_id}-{len(answers)}", generation, prompt, params, answer, adapter
        )
    renderer = call.render(answers)
    renderer.headers = headers_of(options, call)
    return ParsedCall(requests=tuple(requests), renderer=renderer)


async def fallback_of(
    model: LoadedModel, call: DecodedCall, request_id: str
) -> GenerationRequest | None:
    """What to run when the model prefers no tool; checked as ``check_call`` does."""
    if call.fallback is None:
        return None
    options, prompt = model.options.tgi, await _check(model, call.fallback)
    now_s = time.perf_counter()
    timing = Timing(started_s=now_s, validated_s=now_s)
    answer = _answer(model, call, call.fallback, prompt, timing)
    adapter = _adapter(model, call.fallback, request_id)
    params = _sampling_params(options, call.fallback, answer, prompt)
    [request] = _requests(f"{request_id}-text", call.fallback, prompt, params, answer, adapter)
    return request


def headers_of(options: TgiOptions, call: DecodedCall) -> dict[str, str]:
    """Response headers that are known from the start."""
    num_chars = sum(len(generation.inputs) for generation in call.generations)
    headers = {
        "x-compute-type": options.compute_type,
        "x-compute-characters": str(num_chars),
    }
    if call.streams:
        headers |= {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return headers


def _adapter(model: LoadedModel, generation: Generation, request_id: str) -> str:
    """The adapter that was asked for; instead of one that isn't there TGI takes the base model,
    which the log says here."""
    asked = generation.parameters.adapter_id or generation.model
    if asked in model.adapter_names():
        return asked
    is_model = asked == generation.model and (
        not model.options.has_lora or asked in ("", model.options.tgi.model_id)
    )
    if not is_model:
        log.warning(
            "request %s: there is no adapter %r; the base model answers", request_id, asked[:80]
        )
    return ""


async def _check(model: LoadedModel, generation: Generation) -> Prompt:
    parameters, limits, options = generation.parameters, limits_of(model), model.options.tgi
    check_parameters(parameters, options)
    check_inputs(generation.inputs, parameters, limits)
    token_ids = await model.tokenizes.encode(
        generation.inputs, add_special_tokens=generation.add_special_tokens
    )
    prompt = check_lengths(token_ids, parameters, limits, options.version)
    grammar = grammar_of(
        parameters.grammar,
        version=options.version,
        is_disabled=options.disable_grammar_support,
    )
    has_watermark = wants_watermark(parameters, options)
    return replace(prompt, grammar=grammar, has_watermark=has_watermark)


def _answer(
    model: LoadedModel, call: DecodedCall, generation: Generation, prompt: Prompt, timing: Timing
) -> Answer:
    parameters, options = generation.parameters, model.options.tgi
    details = parameters.details or (parameters.decoder_input_details and not call.streams)
    shows_logprobs = generation.shows_logprobs
    if shows_logprobs is None:
        shows_logprobs = details or call.streams or (parameters.best_of or 1) > 1
    return Answer(
        tokenizer=model.tokenizer,
        timing=timing,
        max_new_tokens=prompt.max_new_tokens,
        num_prompt_tokens=len(prompt.token_ids),
        prefix=generation.inputs if parameters.return_full_text else "",
        details=details,
        prefill=parameters.decoder_input_details
        and (options.version < 3 or options.enable_prefill_logprobs),
        top_tokens=bool(parameters.top_n_tokens) and (details or call.streams),
        shows_logprobs=shows_logprobs,
        num_sequences=max(1, parameters.best_of or 1),
        as_list=call.as_list,
        version=options.version,
    )


def _sampling_params(
    options: TgiOptions, generation: Generation, answer: Answer, prompt: Prompt
) -> SamplingParams:
    p = generation.parameters
    temperature = 1.0 if p.temperature is None else p.temperature
    filters = (p.top_k, p.top_p, p.typical_p)
    samples = p.do_sample or temperature != 1.0 or any(value is not None for value in filters)
    return SamplingParams(
        max_new_tokens=answer.max_new_tokens,
        min_new_tokens=p.min_new_tokens,
        temperature=temperature if samples else 0.0,
        top_k=p.top_k or 0,
        top_p=1.0 if p.top_p is None else p.top_p,
        typical_p=1.0 if p.typical_p is None else p.typical_p,
        repetition_penalty=1.0 if p.repetition_penalty is None else p.repetition_penalty,
        presence_penalty=generation.presence_penalty,
        frequency_penalty=p.frequency_penalty or 0.0,
        no_repeat_ngram_size=p.no_repeat_ngram_size,
        bad_words=tuple(p.bad_words),
        logit_bias=generation.logit_bias or logit_bias(p.logit_bias),
        seed=p.seed if samples else None,
        stop=tuple(p.stop),
        include_stop=True,
        logprobs=((p.top_n_tokens or 0) if answer.top_tokens else 0)
        if answer.shows_logprobs
        else None,
        prompt_logprobs=0 if answer.prefill else None,
        grammar=prompt.grammar,
        watermark_gamma=options.watermark_gamma,
        watermark_delta=options.watermark_delta if prompt.has_watermark else 0.0,
    )


def _parameters(given: GenerateParameters | UnsetType) -> GenerateParameters:
    """Without any parameters the text is sampled; with some, only if they say so."""
    return GenerateParameters(do_sample=True) if given is UNSET else given


def _requests(
    request_id: str,
    generation: Generation,
    prompt: Prompt,
    params: SamplingParams,
    answer: Answer,
    adapter: str,
) -> list[GenerationRequest]:
    """One per sequence: those of ``best_of`` have a seed of their own each."""
    return [
        GenerationRequest(
            request_id=f"{request_id}-{i}",
            prompt_token_ids=prompt.token_ids,
            params=params,
            max_queue_s=generation.parameters.max_queue_s,
            echo=answer.prefill,
            adapter=adapter,
        )
        for i in range(answer.num_sequences)
    ]
