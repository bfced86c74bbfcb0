"""TGI's ``/v1`` bodies and ``/invocations`` as decoded calls."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec

from lmi_server.dialects.base import Renderer
from lmi_server.dialects.tgi.events import Answer
from lmi_server.dialects.tgi.options import TgiOptions
from lmi_server.dialects.tgi.schema import CompatBody, decode_any, log_unknown, wrong_shape
from lmi_server.dialects.tgi.tgi import DecodedCall, Generation, compat_call, ignore_text
from lmi_server.dialects.tgi.tool_events import ToolCalls, ToolRenderer, ToolSseRenderer
from lmi_server.dialects.tgi.tools import TgiTools
from lmi_server.dialects.tgi.v1_events import (
    ChatRenderer,
    ChatSseRenderer,
    CompletionRenderer,
    CompletionSseRenderer,
    Identity,
    v1_error_event,
)
from lmi_server.dialects.tgi.v1_schema import (
    ChatBody,
    CompletionBody,
    V1Body,
    chat_parameters,
    chat_tools,
    check_completion,
    completion_parameters,
    decode_chat,
    decode_completion,
    logit_bias,
    render_chat,
)
from lmi_server.models.stand_in import DecodingModel

_AnyBody = CompatBody | ChatBody | CompletionBody


def chat_call(model: DecodingModel, body: bytes) -> DecodedCall:
    """A body of ``/v1/chat/completions``."""
    return _chat_call(model, decode_chat(body))


def completion_call(model: DecodingModel, body: bytes) -> DecodedCall:
    """A body of ``/v1/completions``."""
    return _completion_call(model, decode_completion(body))


def invocation_call(model: DecodingModel, body: bytes) -> DecodedCall:
    """A body of ``/invocations``: the first of three kinds that fits, as in release 2.4."""
    value = decode_any(body)
    kinds: tuple[type[_AnyBody], ...] = (CompatBody, ChatBody, CompletionBody)
    for kind in kinds:
        try:
            decoded = msgspec.convert(value, kind)
        except (msgspec.ValidationError, RecursionError):
            continue
        log_unknown(body, decoded)
        match decoded:
            case CompatBody():
                return compat_call(decoded)
            case ChatBody():
                return _chat_call(model, decoded)
            case _:
                return _completion_call(model, decoded)
    raise wrong_shape("data did not match any variant of untagged enum SagemakerRequest")


def chat_text(model: DecodingModel, body: bytes) -> str:
    """The prompt that a chat's messages make."""
    chat = decode_chat(body)
    return render_chat(chat, model.options.chat_template, chat_tools(chat))


def _chat_call(model: DecodingModel, body: ChatBody) -> DecodedCall:
    tools = chat_tools(body)
    generation = _generation(model, body, tools)
    fallback = _generation(model, body, None) if tools is not None and tools.is_free else None
    calls = None if tools is None else ToolCalls()
    return DecodedCall(
        generations=(generation,),
        streams=body.stream,
        render=partial(_chat_renderer, _identity(model.options.tgi, body), body, calls),
        render_error=v1_error_event,
        fallback=fallback,
        on_text=ignore_text if calls is None else calls.answer_in_text,
    )


def _generation(model: DecodingModel, body: ChatBody, tools: TgiTools | None) -> Generation:
    return Generation(
        inputs=render_chat(body, model.options.chat_template, tools),
        parameters=chat_parameters(body, model.options.tgi.version, tools),
        add_special_tokens=False,
        shows_logprobs=bool(body.logprobs),
        presence_penalty=body.presence_penalty or 0.0,
        logit_bias=logit_bias(body),
        model=body.adapter,
    )


def _completion_call(model: DecodingModel, body: CompletionBody) -> DecodedCall:
    options = model.options.tgi
    check_completion(body, options)
    parameters = completion_parameters(body, options.version)
    identity = _identity(options, body)
    kind = CompletionSseRenderer if body.stream else CompletionRenderer
    return DecodedCall(
        generations=tuple(
            Generation(
                inputs=prompt,
                parameters=parameters,
                shows_logprobs=False,
                model=body.adapter,
            )
            for prompt in body.prompts
        ),
        streams=body.stream,
        render=partial(kind, identity),
        render_error=v1_error_event,
    )


def _identity(options: TgiOptions, body: V1Body) -> Identity:
    """Release 3 repeats the model that was asked for; 2 says which one it is."""
    model = options.model_id
    if options.version >= 3 and body.model is not None:
        model = body.model
    return Identity(model=model, fingerprint=f"{options.release}-native")


def _chat_renderer(
    identity: Identity, body: ChatBody, calls: ToolCalls | None, answers: Sequence[Answer]
) -> Renderer:
    if calls is not None:
        if body.stream:
            return ToolSseRenderer(
                identity, answers, includes_usage=body.includes_usage, calls=calls
            )
        return ToolRenderer(identity, answers, calls)
    if body.stream:
        return ChatSseRenderer(identity, answers, includes_usage=body.includes_usage)
    return ChatRenderer(identity, answers)
