"""OpenAI's ``/v1/responses``: chats under other names, and responses that are stored.

A request is translated into a chat, so that tools, reasoning, grammars and templates are those of
``/v1/chat/completions``.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import islice
from typing import Any

import msgspec

from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import UserError
from lmi_server.dialects.base import Call, ParsedCall
from lmi_server.dialects.generation import parse_call
from lmi_server.dialects.openai.chat_schema import (
    chat_request,
    chat_sampling_params,
    form_of,
    tools_of,
)
from lmi_server.dialects.openai.errors import PreviousResponseNotFound
from lmi_server.dialects.openai.openai import (
    STREAM_HEADERS,
    adapter_named,
    check_content_type,
    render_chat,
)
from lmi_server.dialects.openai.responses_input import messages_of
from lmi_server.dialects.openai.responses_output import (
    Response,
    ResponseEventsRenderer,
    ResponseRenderer,
)
from lmi_server.dialects.openai.responses_schema import (
    WITHIN,
    ResponsesBody,
    chat_of,
    decode_responses,
)
from lmi_server.dialects.openai.responses_store import ResponseStore, Stored
from lmi_server.dialects.openai.schema import with_defaults
from lmi_server.dialects.unknown_fields import report_fields
from lmi_server.models.loaded_model import LoadedModel
from lmi_server.models.stand_in import DecodingModel

_PREVIOUS = re.compile(rb'"previous_response_id"\s{0,999}:\s{0,999}"(resp_[0-9a-f]{32})"')
_MAX_PREVIOUS = 4
"""A body has one; what looks like it may be in what it holds."""
_PIECE_BYTES, _OVERLAP_BYTES = 1 << 20, 1 << 12
"""How much of a body is searched at once, beyond which a match may go on."""
_FIELDS = {
    "messages": "input",
    "response_format": "text.format",
    "guided_grammar": "tools",
    "max_tokens": "max_output_tokens",
}
"""Fields of chats, and what they are called here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesCall(Call):
    """A call with the stored responses that it may name."""

    previous: Mapping[str, Stored] = field(default_factory=dict)
    stores: bool
    """Whether responses are stored here at all."""


def parse_with_stored(model: DecodingModel, call: ResponsesCall) -> ParsedCall:
    """Of a call with the responses that it names. UserError names the field at fault."""
    try:
        return _parse(model, call)
    except UserError as error:
        error.field = _FIELDS.get(error.field or "", error.field)
        raise


def _parse(model: DecodingModel, call: ResponsesCall) -> ParsedCall:
    check_content_type(call.content_type)
    asked = decode_responses(call.body)
    stores = call.stores if asked.store is None else asked.store
    if stores and not call.stores:
        raise UserError(
            "store is true, but responses aren't stored here (response_store_size is 0); send "
            "store: false",
            field="store",
        )
    adapter = adapter_named(model, asked.model)
    chat, messages, customs = chat_of(asked, _previous(call, asked))
    template = model.options.chat_template
    tools = tools_of(chat, template)
    prompt = render_chat(model, chat)
    assert template is not None
    form = form_of(chat, template, tools, prompt)
    sampled = with_defaults(chat, model.options.sampling_defaults)
    params = _named(chat_sampling_params(sampled, form))
    head = _head(asked, asked.model or model.options.model_name)
    response = Response(head, form, frozenset(customs.formats), customs.sole, stores=stores)
    response.messages = json.dumps(messages).encode() if stores else None
    renderer = (ResponseEventsRenderer if asked.stream else ResponseRenderer)(response)
    renderer.headers = STREAM_HEADERS if asked.stream else {}
    report_fields(call, asked.__struct_fields__, WITHIN)
    return ParsedCall(
        requests=(chat_request(call.request_id, chat, prompt, params, adapter),),
        renderer=renderer,
        prompt_field="input",
    )


def _previous(call: ResponsesCall, asked: ResponsesBody) -> list[dict[str, Any]]:
    """The conversation that is gone on with."""
    name = asked.previous_response_id
    if name is None:
        return []
    if not call.stores:
        raise UserError(
            "previous_response_id needs stored responses, but none are stored here "
            "(response_store_size is 0); send the whole input",
            field="previous_response_id",
        )
    stored = call.previous.get(name)
    if stored is None:
        raise PreviousResponseNotFound(name)
    messages: list[dict[str, Any]] = msgspec.json.decode(stored.messages)
    output = msgspec.json.decode(stored.response)["output"]
    said = [item for item in output if "call" not in item["type"] or _is_whole(item)]
    return messages_of(said, messages) if said else messages


async def parse_response(model: LoadedModel, tenant: str, call: Call) -> ParsedCall:
    """Brings calls and a tenant's stored responses together: parsing may happen in another
    process."""
    store = model.shared.responses
    search = partial(_previous_names, call.body)
    is_long = len(call.body) > _PIECE_BYTES
    names = await asyncio.to_thread(search) if is_long else search()
    found = {name: store.find(tenant, name) for name in names}
    given = {each.name: getattr(call, each.name) for each in fields(call)}
    previous = {name: stored for name, stored in found.items() if stored is not None}
    beside = b"".join(stored.messages for stored in previous.values())
    asked = ResponsesCall(**given, previous=previous, stores=store.is_on)
    parsed = await parse_call(model, partial(parse_with_stored, model), asked, beside=beside)
    assert isinstance(parsed.renderer, ResponseRenderer)
    response = parsed.renderer.response
    if response.messages is not None:
        response.keep = partial(_keep, store, tenant, response.messages)
    return parsed


def _previous_names(body: bytes) -> set[str]:
    matches = (
        match[1].decode()
        for start in range(0, len(body), _PIECE_BYTES)
        for match in _PREVIOUS.finditer(body, start, start + _PIECE_BYTES + _OVERLAP_BYTES)
    )
    return set(islice(matches, _MAX_PREVIOUS))


def _keep(store: ResponseStore, tenant: str, messages: bytes, name: str, response: str) -> bool:
    return store.put(tenant, name, Stored(response.encode("utf-8", "replace"), messages))


def _is_whole(item: Mapping[str, Any]) -> bool:
    return bool(item["status"] == "completed")


def _named(params: SamplingParams) -> SamplingParams:
    """With a grammar that errors name as the body does."""
    grammar = params.grammar
    if grammar is None or grammar.field not in _FIELDS:
        return params
    return replace(params, grammar=replace(grammar, field=_FIELDS[grammar.field]))


def _head(asked: ResponsesBody, model: str) -> dict[str, Any]:
    """What a response says of its request."""
    reasoning, text = asked.reasoning or {}, asked.text or {}
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "background": False,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": asked.max_tool_calls,
        "metadata": asked.metadata or {},
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": asked.previous_response_id,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "temperature": 1.0 if asked.temperature is None else asked.temperature,
        "text": {"format": text.get("format") or {"type": "text"}},
        "tool_choice": asked.tool_choice or "auto",
        "tools": asked.tools or [],
        "top_p": 1.0 if asked.top_p is None else asked.top_p,
        "truncation": "disabled",
        "user": asked.user,
    }
