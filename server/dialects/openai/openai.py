"""The OpenAI protocol: completions and chat completions, as OpenAI's own clients expect them.

Fields that OpenAI or open servers know and that change nothing here are ignored, unknown ones with
a warning; those whose mechanism isn't there are refused.
"""

from __future__ import annotations

from functools import partial

from lmi_core.engine.request import GenerationRequest
from lmi_core.errors import UserError
from lmi_server.dialects.base import (
    ANY_MODEL,
    UTF8_EVENTS,
    Call,
    HttpError,
    ParsedCall,
    Renderer,
)
from lmi_server.dialects.openai.chat_output import ChatRenderer, ChatStreamRenderer
from lmi_server.dialects.openai.chat_schema import (
    ChatBody,
    chat_prompt,
    chat_request,
    chat_sampling_params,
    decode_chat,
    echoed_text,
    form_of,
    tools_of,
)
from lmi_server.dialects.openai.completion_output import (
    Echo,
    completion_renderer,
)
from lmi_server.dialects.openai.completion_schema import (
    completion_requests,
    completion_sampling_params,
    decode_completion,
    infill_of,
    prompts_of,
    with_suffix,
)
from lmi_server.dialects.openai.errors import ModelNotFound, error_body
from lmi_server.dialects.openai.output import Answer
from lmi_server.dialects.openai.schema import WITHIN, OpenAIBody, with_defaults
from lmi_server.dialects.pooling import pooling_of
from lmi_server.dialects.unknown_fields import report_fields
from lmi_server.models.stand_in import DecodingModel

_POOLING_ROUTES = {"embed": "/v1/embeddings", "rerank": "/v1/rerank"}
"""By the task of models that don't generate."""
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def parse_completion(model: DecodingModel, call: Call) -> ParsedCall:
    """UserError names the field that can't be served as written."""
    check_content_type(call.content_type)
    body = with_defaults(decode_completion(call.body), model.options.sampling_defaults)
    adapter = adapter_named(model, body.model)
    prompts = prompts_of(body)
    params = completion_sampling_params(body)
    answer = _answer(model, f"cmpl-{call.request_id}", body, len(prompts), body.logprobs)
    echo = None
    if body.echo:
        texts = tuple(p if isinstance(p, str) else model.decode(p) for p in prompts)
        echo = Echo(prompts=texts, without_output=body.scores_only)
    renderer = completion_renderer(
        answer, echo, streams=bool(body.stream), num_candidates=body.num_candidates
    )
    whole = with_suffix(prompts, body.suffix, partial(infill_of, model))
    requests = completion_requests(call.request_id, body, whole, params, adapter)
    return _parsed(call, body, requests, renderer)


def parse_chat(model: DecodingModel, call: Call) -> ParsedCall:
    """As ``parse_completion``."""
    check_content_type(call.content_type)
    template = model.options.chat_template
    body = with_defaults(decode_chat(call.body), model.options.sampling_defaults)
    adapter = adapter_named(model, body.model)
    if body.top_logprobs is not None and not body.logprobs:
        raise UserError("top_logprobs needs logprobs: true", field="top_logprobs")
    tools = tools_of(body, template)
    prompt = render_chat(model, body)
    assert template is not None
    form = form_of(body, template, tools, prompt)
    params = chat_sampling_params(body, form)
    answer = _answer(model, f"chatcmpl-{call.request_id}", body, 1, params.logprobs)
    kind = ChatStreamRenderer if body.stream else ChatRenderer
    renderer: Renderer = kind(answer, form, before=echoed_text(body))
    request = chat_request(call.request_id, body, prompt, params, adapter)
    return _parsed(call, body, (request,), renderer, prompt_field="messages")


def render_chat(model: DecodingModel, body: ChatBody) -> str:
    """The prompt of a chat; UserError when the model has no template."""
    options = model.options
    if options.chat_template is None:
        pooling = pooling_of(model)
        route = "/v1/completions" if pooling is None else _POOLING_ROUTES[pooling.task]
        raise UserError(
            f"The model {options.model_name} has no chat template; use {route} instead",
            field="messages",
        )
    return chat_prompt(body, options.chat_template)


def adapter_named(model: DecodingModel, name: str | None) -> str:
    """The adapter that a body's ``model`` names, "" for the model itself; ModelNotFound."""
    model_name = model.options.model_name
    if name is None or name == model_name:
        return ""
    adapters = model.adapter_names()
    if name in adapters:
        return name
    verb = "are" if adapters else "is"
    if name in ANY_MODEL:
        return ""
    served = ", ".join(map(repr, (model_name, *adapters)))
    raise ModelNotFound(name, f"{served} {verb} served here")


def _answer(
    model: DecodingModel,
    answer_id: str,
    body: OpenAIBody,
    num_prompts: int,
    logprobs: int | None,
) -> Answer:
    return body.answer(
        id=answer_id,
        model=body.model or model.options.model_name,
        error=error_body,
        num_choices=body.num_choices,
        num_prompts=num_prompts,
        logprobs=logprobs is not None,
        has_prompt_logprobs=not body.stream,
        fingerprint=model.fingerprint(),
    )


def _parsed(
    call: Call,
    body: OpenAIBody,
    requests: tuple[GenerationRequest, ...],
    renderer: Renderer,
    prompt_field: str = "prompt",
) -> ParsedCall:
    if body.stream_options is not None and not body.stream:
        raise UserError("stream_options needs stream: true", field="stream_options")
    if renderer.streams:
        renderer.content_type, renderer.headers = UTF8_EVENTS, STREAM_HEADERS
    report_fields(call, body.__struct_fields__, WITHIN)
    return ParsedCall(
        requests=requests,
        renderer=renderer,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        prompt_field=prompt_field,
    )


def check_content_type(content_type: str) -> None:
    """HttpError 415 for anything but JSON; saying nothing is fine."""
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type not in ("", "application/json"):
        raise HttpError(
            415,
            "UnsupportedMediaTypeException",
            f"Content-Type {media_type[:80]!r} is not supported; send application/json",
        )
