"""Admit, read, parse, run, answer: what every route that generates does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TypeVar

from aiohttp import web

from lmi_server.dialects.base import Call, HttpError, ParsedCall
from lmi_server.dialects.large_bodies import decoded, named_as
from lmi_server.dialects.unknown_fields import IGNORED, collect_ignored, refuse_ignored
from lmi_server.http.metrics import METER
from lmi_server.http.properties import request_properties
from lmi_server.http.streaming import owned_requests, respond
from lmi_server.models.loaded_model import LoadedModel
from lmi_server.models.recorded import recorded

T = TypeVar("T")

Parse = Callable[[Call], ParsedCall]
Read = Callable[[web.Request, Call], AbstractAsyncContextManager[Call]]
"""Makes another call of one, for as long as the block lasts."""


async def generate(
    request: web.Request, model: LoadedModel, parse: Parse, read: Read | None = None
) -> web.StreamResponse:
    """The answer to a call that ``parse`` understands, of a body that ``read`` may change."""
    return await generate_with(request, model, partial(parse_call, model, parse), read)


async def parse_call(
    model: LoadedModel, parse: Parse, call: Call, *, beside: bytes = b""
) -> ParsedCall:
    """What a call asks for; ``beside``: JSON that is decoded with its body."""
    decode = partial(_parse_body, parse, replace(call, body=b""))
    return await decoded(decode, call.body, model, beside=beside)


def _parse_body(parse: Parse, call: Call, body: bytes) -> ParsedCall:
    """What a call asks for whose body comes beside it."""
    return parse(replace(call, body=body))


async def read_known(
    request: web.Request, model: LoadedModel, decode: Callable[[bytes], T], body: bytes
) -> T:
    """What ``decode`` makes of a body; fields that nobody knows are reported, or refused by a
    server that is strict."""
    request[IGNORED] = ignored = collect_ignored()
    value = await decoded(decode, body, model)
    if model.options.strict_requests:
        refuse_ignored(ignored)
    return value


async def generate_with(
    request: web.Request,
    model: LoadedModel,
    parse: Callable[[Call], Awaitable[ParsedCall]],
    read: Read | None = None,
) -> web.StreamResponse:
    """As ``generate``, with a ``parse`` that may wait."""
    if not model.backend.healthy:
        raise HttpError(503, "WlmException", f"Model is not ready: {model.options.model_name}")
    with model.admission.enter():
        model.shared.loop_lag.wake()
        request[IGNORED] = collect_ignored()
        call = Call(
            request_id=f"{request[METER].request_id}-{next(model.call_numbers)}",
            body=await model.admission.read_body(request),
            content_type=request.headers.get("Content-Type", ""),
            headers=request_properties(request.headers),
            query=dict(request.query),  # a dict can be pickled
        )
        async with nullcontext(call) if read is None else read(request, call) as call:
            parsed = await parse(call)
            if model.options.strict_requests:
                ignored = request[IGNORED]
                refuse_ignored(ignored)
            engine = recorded(request, model)
            with named_as(parsed.prompt_field):
                requests = await owned_requests(request, engine, parsed)
                return await respond(request, model, engine, requests, parsed.renderer)
