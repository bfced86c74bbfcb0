"""The OpenAI protocol: completions and chat completions, as OpenAI's own clients expect them.

Fields that OpenAI or open servers know and that change nothing here are ignored, unknown ones with
a warning; those whose mechanism isn't there are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from lmi_core.engine.request import GenerationRequest
from lmi_core.errors import UserError
from lmi_core.models.pooling import PoolingSpec
from lmi_core.text.chat import ChatTemplate
from lmi_core.text.infill import InfillForm, no_infill
from lmi_server.dialects.base import (
    ANY_MODEL,
    UTF8_EVENTS,
    AdapterNames,
    Call,
    HttpError,
    ParsedCall,
    Renderer,
    no_adapters,
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
    CompletionRenderer,
    CompletionStreamRenderer,
    Echo,
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
from lmi_server.dialects.unknown_fields import report_unknown, unknown_fields
from lmi_server.models.loaded_model import LoadedModel

Decode = Callable[[Sequence[int]], str]

_POOLING_ROUTES = {"embed": "/v1/embeddings", "rerank": "/v1/rerank"}
"""By the task of models that don't generate."""
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class OpenAIProtocol:
    """Parses the bodies of one model. UserError names the field that can't be served as written."""

    def __init__(
        self,
        model_name: str,
        chat_template: ChatTemplate | None = None,
        *,
        decode: Decode,
        infill: Callable[[], InfillForm | None] = no_infill,
        adapters: AdapterNames = no_adapters,
        pooling: Callable[[], PoolingSpec | None] = lambda: None,
        fingerprint: Callable[[], str | None] = lambda: None,
        defaults: Mapping[str, float] | None = None,
    ) -> None:
        """``decode``: the text of token ids, for prompts that come as ids and are echoed;
        ``infill``: the model's form of prompts with a suffix; ``pooling``: None for models that
        generate; ``defaults``: of sampling, by the fields of bodies."""
        self.defaults = defaults or {}
        self._model_name = model_name
        self._chat_template = chat_template
        self.decode = decode
        self._infill = infill
        self._adapters = adapters
        self._pooling = pooling
        self._fingerprint = fingerprint

    def parse_completion(self, call: Call) -> ParsedCall:
        check_content_type(call.content_type)
        body = with_defaults(decode_completion(call.body), self.defaults)
        adapter = self.adapter_named(body.model)
        prompts = prompts_of(body)
        params = completion_sampling_params(body)
        answer = self._answer(f"cmpl-{call.request_id}", body, len(prompts), body.logprobs)
        echo = None
        if body.echo:
            texts = tuple(p if isinstance(p, str) else self.decode(p) for p in prompts)
            echo = Echo(prompts=texts, without_output=body.scores_only)
        renderer: Renderer
        if body.stream:
            renderer = CompletionStreamRenderer(answer, echo)
        else:
            renderer = CompletionRenderer(answer, echo, num_candidates=body.num_candidates)
        whole = with_suffix(prompts, body.suffix, self._infill)
        requests = completion_requests(call.request_id, body, whole, params, adapter)
        return _parsed(call, body, requests, renderer)

    def parse_chat(self, call: Call) -> ParsedCall:
        check_content_type(call.content_type)
        body = with_defaults(decode_chat(call.body), self.defaults)
        adapter = self.adapter_named(body.model)
        if body.top_logprobs is not None and not body.logprobs:
            raise UserError("top_logprobs needs logprobs: true", field="top_logprobs")
        tools = tools_of(body, self._chat_template)
        prompt = self.render_chat(body)
        assert self._chat_template is not None
        form = form_of(body, self._chat_template, tools, prompt)
        params = chat_sampling_params(body, form)
        answer = self._answer(f"chatcmpl-{call.request_id}", body, 1, params.logprobs)
        kind = ChatStreamRenderer if body.stream else ChatRenderer
        renderer: Renderer = kind(answer, form, before=echoed_text(body))
        request = chat_request(call.request_id, body, prompt, params, adapter)
        return _parsed(call, body, (request,), renderer, prompt_field="messages")

    def render_chat(self, body: ChatBody) -> str:
        """The prompt of a chat; UserError when the model has no template."""
        if self._chat_template is None:
            pooling = self._pooling()
            route = "/v1/completions" if pooling is None else _POOLING_ROUTES[pooling.task]
            raise UserError(
                f"The model {self._model_name} has no chat template; use {route} instead",
                field="messages",
            )
        return chat_prompt(body, self._chat_template)

    def adapter_named(self, name: str | None) -> str:
        """The adapter that a body's ``model`` names, "" for the model itself; ModelNotFound."""
        if name is None or name == self._model_name:
            return ""
        adapters = self._adapters()
        if name in adapters:
            return name
        verb = "are" if adapters else "is"
        if name in ANY_MODEL:
            return ""
        served = ", ".join(map(repr, (self._model_name, *adapters)))
        raise ModelNotFound(name, f"{served} {verb} served here")

    def _answer(
        self, answer_id: str, body: OpenAIBody, num_prompts: int, logprobs: int | None
    ) -> Answer:
        return body.answer(
            id=answer_id,
            model=body.model or self._model_name,
            error=error_body,
            num_choices=body.num_choices,
            num_prompts=num_prompts,
            logprobs=logprobs is not None,
            has_prompt_logprobs=not body.stream,
            fingerprint=self._fingerprint(),
        )


def openai_protocol(model: LoadedModel) -> OpenAIProtocol:
    return OpenAIProtocol(
        model.options.model_name,
        model.options.chat_template,
        decode=model.decode,
        infill=partial(infill_of, model),
        adapters=model.adapter_names,
        pooling=partial(pooling_of, model),
        fingerprint=model.fingerprint,
        defaults=model.options.sampling_defaults,
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
    unknown = unknown_fields(call.body, body.__struct_fields__, WITHIN)
    report_unknown(call.request_id, unknown, "fields")
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
