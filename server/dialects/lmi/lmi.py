"""The LMI protocol: ``/invocations`` as DJL-Serving's LMI containers speak it.

The format is that of releases 0.28 and 0.29 (djl_python/output_formatter.py): request errors are
HTTP 424 with ``{"code":424,"error":...}``, errors of the server itself are pretty-printed objects
with ``code``, ``type`` and ``message``. ``LmiOptions.release`` chooses the forms of one release
instead, chat included, but not its faults: answers in pieces that aren't JSON, text twice,
unescaped prompts, ids of a built-in function, missing content types, errors without text, and
prompts of chats that don't ask for an answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import UserError
from lmi_server.dialects.base import Call, ParsedCall, Renderer
from lmi_server.dialects.best_of import check_num_sequences
from lmi_server.dialects.decode import decode_text
from lmi_server.dialects.lmi.adapters import adapters_named
from lmi_server.dialects.lmi.chat import parse_chat
from lmi_server.dialects.lmi.completion import parse_completion
from lmi_server.dialects.lmi.formatted import FormattedRenderer, FormattedRequest
from lmi_server.dialects.lmi.options import LmiOptions
from lmi_server.dialects.lmi.output import (
    Answer,
    JsonLinesRenderer,
    JsonRenderer,
    OlderLinesRenderer,
    SseRenderer,
)
from lmi_server.dialects.lmi.pipeline_output import PipelineLinesRenderer
from lmi_server.dialects.lmi.release import Release, split_parameters
from lmi_server.dialects.lmi.sampling import (
    cached_prompt,
    num_beams,
    num_candidates,
    num_choices,
    sampling_params,
    truncate,
    with_strategy,
)
from lmi_server.dialects.lmi.schema import (
    LmiBody,
    LmiParameters,
    decode_body,
    decode_parameters,
)
from lmi_server.dialects.unknown_fields import report_unknown, unknown_fields
from lmi_server.models.stand_in import DecodingModel

log = logging.getLogger(__name__)

_FORMATTERS = ("json", "jsonlines", "sse")
_MAX_PROMPTS = 256
PIPELINE_TOKENS, PIPELINE_STREAM_TOKENS = 20, 50
"""max_new_tokens of requests that don't say it, to pipelines and where these stream."""


def parse_invocation(model: DecodingModel, call: Call) -> ParsedCall:
    """Raises UserError naming the field when the call can't be served as written."""
    options = model.options.lmi
    release = options.form
    body = _decode(call)
    if body.messages is not None:
        return parse_chat(model, call, body)
    if body.prompt is not None and body.inputs is None and options.release is None:
        return parse_completion(model, call, body)
    prompts = _prompts(body)
    known, later = split_parameters(body.parameters or {}, release)
    parameters, unknown = decode_parameters(known)
    fields = unknown_fields(call.body, body.__struct_fields__) if _is_json(call) else ()
    check_num_sequences(len(prompts), num_candidates(parameters), "inputs")
    adapters = adapters_named(model, body.adapters, call, len(prompts))
    parameters, ignored = with_strategy(parameters, options.strategy)
    cached, not_cached = cached_prompt(body, parameters)
    stream = bool(body.stream) and release.has_stream_field
    formatter = _formatter(options, parameters, stream=stream)
    answer = _answer(options, body, parameters, prompts)
    pipeline = options.pipeline if formatter == "json" else ""
    if pipeline:
        given = body.parameters or {}
        answer = _of_pipeline(answer, given)
        if "max_new_tokens" not in given:
            tokens = PIPELINE_TOKENS if pipeline == "answers" else PIPELINE_STREAM_TOKENS
            parameters = msgspec.structs.replace(parameters, max_new_tokens=tokens)
    if formatter != "json":
        _refuse_streamed(answer)
    elif pipeline.startswith("lines"):
        _refuse_candidates(answer)
    shows_tokens = answer.details or formatter != "json"
    params = _params(options, parameters, answer, shows_tokens=shows_tokens)
    make = _formatted(call, body, prompts[0]) if formatter == "custom" else GenerationRequest
    requests = tuple(
        make(
            request_id=call.request_id if len(prompts) == 1 else f"{call.request_id}-{i}",
            prompt=cached + prompt,
            params=params,
            max_queue_s=parameters.max_queue_s,
            echo=answer.prompt_tokens,
            adapter=adapters[i],
        )
        for i, prompt in enumerate(prompts)
    )
    num_kept = truncate(parameters)
    renderer = _renderer(formatter, answer, pipeline, stream=stream)
    not_used = (*fields, *later, *unknown, *ignored, *not_cached)
    renderer.headers = report_unknown(call.request_id, not_used, "parameters")
    return ParsedCall(requests=requests, renderer=renderer, truncate_prompt_tokens=num_kept)


def _formatted(call: Call, body: LmiBody, prompt: str) -> Callable[..., GenerationRequest]:
    """Makes requests that bring a formatter what it reads."""
    return partial(
        FormattedRequest,
        text=prompt,
        parameters=body.parameters or {},
        input_number=call.input_number,
    )


def _formatter(options: LmiOptions, parameters: LmiParameters, *, stream: bool) -> str:
    if options.custom_formatter:
        return "custom"
    if options.output_formatter is not None:
        return options.output_formatter
    if parameters.output_formatter in _FORMATTERS:
        return parameters.output_formatter
    if parameters.output_formatter is not None:
        allowed = ", ".join(_FORMATTERS)
        log.warning("unknown output_formatter is not used; allowed are %s", allowed)
    if not stream:
        return "json"
    return "sse" if options.tgi_compat else "jsonlines"


def _params(
    options: LmiOptions, parameters: LmiParameters, answer: Answer, *, shows_tokens: bool
) -> SamplingParams:
    """What a request asks for, with what the options add."""
    params = sampling_params(parameters, answer, shows_tokens=shows_tokens)
    params = replace(params, stop=(*params.stop, *options.stop))
    if not parameters.watermark:
        return params
    gamma, delta = options.watermark_gamma, options.watermark_delta
    return replace(params, watermark_gamma=gamma, watermark_delta=delta)


def _answer(
    options: LmiOptions, body: LmiBody, parameters: LmiParameters, prompts: tuple[str, ...]
) -> Answer:
    choices = num_choices(parameters)
    tgi_compat = options.tgi_compat
    details = tgi_compat if parameters.details is None else parameters.details
    return Answer(
        prompts=prompts,
        as_list=tgi_compat or isinstance(body.inputs, list),
        num_choices=choices,
        num_candidates=num_candidates(parameters),
        is_ranked=num_beams(parameters) > 1,
        details=details or choices > 1,
        full_text=parameters.return_full_text,
        prompt_tokens=parameters.decoder_input_details or parameters.prompt_logprobs is not None,
        top_tokens=bool(parameters.top_n_tokens or parameters.logprobs),
        tgi_names=tgi_compat,
        release=options.form,
    )


def _is_json(call: Call) -> bool:
    """Of a body that was decoded."""
    return bool(call.body) and "text/plain" not in call.content_type.lower()


def _decode(call: Call) -> LmiBody:
    content_type = call.content_type.lower()
    if not call.body:
        return LmiBody(inputs="")
    if not _is_json(call):
        return LmiBody(inputs=decode_text(call.body))
    looks_like_json = call.body.lstrip()[:1] == b"{"
    if "json" in content_type or not content_type or looks_like_json:
        return decode_body(call.body)
    raise UserError(
        f"Content-Type {call.content_type!r} is not supported; send application/json or text/plain",
        field="Content-Type",
    )


def _prompts(body: LmiBody) -> tuple[str, ...]:
    if body.inputs is None:
        raise UserError(
            'The body needs the field inputs, for example {"inputs": "Once upon a time"}',
            field="inputs",
        )
    prompts = (body.inputs,) if isinstance(body.inputs, str) else tuple(body.inputs)
    if not prompts or not all(prompts):
        raise UserError("inputs is empty; send at least one character of prompt", field="inputs")
    if len(prompts) > _MAX_PROMPTS:
        raise UserError(
            f"inputs has {len(prompts)} prompts; at most {_MAX_PROMPTS} fit into one request",
            field="inputs",
        )
    return prompts


def _refuse_streamed(answer: Answer) -> None:
    if len(answer.prompts) > 1:
        raise UserError(
            f"inputs has {len(answer.prompts)} prompts, but only one can be streamed; "
            "send one per request, or stream: false",
            field="inputs",
        )
    _refuse_candidates(answer)


def _refuse_candidates(answer: Answer) -> None:
    if answer.num_candidates > 1:
        raise UserError(
            f"n, best_of or num_beams is {answer.num_candidates}, but only one sequence can be "
            "streamed; send 1, or stream: false",
            field="parameters.n",
        )


def _of_pipeline(answer: Answer, parameters: Mapping[str, Any]) -> Answer:
    """How the reference's text-generation pipeline answers: a list, texts with their prompts."""
    full_text = parameters.get("return_full_text") is not False
    return replace(answer, as_list=True, full_text=full_text, indented=True)


def _renderer(formatter: str, answer: Answer, pipeline: str, *, stream: bool) -> Renderer:
    if pipeline.startswith("lines"):
        return PipelineLinesRenderer(answer, starts_with_prompt="prompt" in pipeline)
    match formatter:
        case "custom":
            return FormattedRenderer(streamed=stream)
        case "json":
            return JsonRenderer(answer)
        case "jsonlines" if answer.release <= Release.V0_27:
            return OlderLinesRenderer(answer)
        case "jsonlines":
            return JsonLinesRenderer(answer)
        case _:
            return SseRenderer(answer)
