"""The answer to one line of a batch: as its route would give it, behind everybody else's."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import msgspec

from lmi_core.engine.request import BACKGROUND, GenerationRequest
from lmi_core.errors import CapacityError, UserError
from lmi_server.batches.endpoints import Endpoint
from lmi_server.dialects.base import Call, HttpError, ParsedCall
from lmi_server.dialects.decode import decode_json
from lmi_server.dialects.large_bodies import named_as, rendered
from lmi_server.dialects.openai.errors import ModelNotFound
from lmi_server.dialects.unknown_fields import collect_ignored, refuse_ignored
from lmi_server.http.long_body import num_items
from lmi_server.http.metrics import RequestMeter
from lmi_server.http.several_prompts import collect_one, naming
from lmi_server.http.streaming import truncated
from lmi_server.models.loaded_model import LoadedModel
from lmi_server.models.model_registry import ModelRegistry

_PAUSE_S, _MAX_PAUSE_S = 0.05, 5.0


class _Named(msgspec.Struct):
    model: str | None = None


_NAMED = msgspec.json.Decoder(_Named)


class Answered(NamedTuple):
    status: int
    body: bytes


async def answered(
    models: ModelRegistry,
    endpoint: Endpoint,
    tenant: str,
    request_id: str,
    body: bytes,
    own: Callable[[GenerationRequest], GenerationRequest],
) -> Answered:
    """Waits while models load, or are full, or others wait; whatever else fails is the answer."""
    pause_s = _PAUSE_S
    while True:
        try:
            with _model(models, body).in_use() as model:
                call = Call(request_id=request_id, body=body, content_type="application/json")
                ignored = collect_ignored()
                parsed = await endpoint.parse(model, tenant, call)
                if model.options.strict_requests:
                    refuse_ignored(ignored)
                if parsed.renderer.streams:
                    raise UserError(
                        "a batch's answers aren't streamed; leave stream out", field="stream"
                    )
                await _turn(model)
                with named_as(parsed.prompt_field):
                    return Answered(200, await _whole(model, parsed, own))
        except (CapacityError, HttpError) as error:
            if isinstance(error, HttpError) and error.status not in (429, 503):
                return _failed(endpoint, error)
        except Exception as error:
            return _failed(endpoint, error)
        await asyncio.sleep(pause_s)
        pause_s = min(_MAX_PAUSE_S, 2 * pause_s)


async def _turn(model: LoadedModel) -> None:
    """Wait until no other request waits."""
    while model.backend.stats().num_waiting:  # noqa: ASYNC110 (engines have no event for it)
        await asyncio.sleep(_PAUSE_S)


async def _whole(
    model: LoadedModel, parsed: ParsedCall, own: Callable[[GenerationRequest], GenerationRequest]
) -> bytes:
    backend, meter = model.generates, RequestMeter(parsed.requests[0].request_id)
    is_one = len(parsed.requests) == 1
    for index, asked in enumerate(parsed.requests):
        # A line waits as long as it takes: what expired would only be asked again.
        behind = replace(own(asked), priority=asked.priority + BACKGROUND, max_queue_s=math.inf)
        request = await truncated(backend, behind, parsed.truncate_prompt_tokens)
        with nullcontext() if is_one else naming(index):
            await collect_one(backend, request, index, parsed.renderer, meter)
    return await rendered(parsed.renderer.finish, num_items(parsed.requests, meter))


def _failed(endpoint: Endpoint, error: Exception) -> Answered:
    reply = endpoint.error(error)
    return Answered(reply.status, reply.body)


def _model(models: ModelRegistry, body: bytes) -> LoadedModel:
    """The model that a body names, or the only one; HttpError where it isn't ready."""
    name = decode_json(_NAMED, body).model
    served = models.default
    if name is not None:
        served = models.find(name) or models.with_adapter(name) or models.sole
    if served is None:
        raise ModelNotFound(str(name), "send the name of a model that is served here")
    return served.answering()
