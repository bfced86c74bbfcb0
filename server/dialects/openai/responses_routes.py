"""Routes of OpenAI's responses: of one, of its tokens, and of those that are stored."""

from __future__ import annotations

from functools import partial

import msgspec
from aiohttp import web

from lmi_core.errors import UserError
from lmi_server.dialects.base import Call
from lmi_server.dialects.generation import generate_with
from lmi_server.dialects.openai.responses import parse_response
from lmi_server.dialects.openai.responses_input import items_of
from lmi_server.dialects.openai.responses_schema import ResponsesBody
from lmi_server.dialects.paging import page_of
from lmi_server.dialects.routes import ModelRoute, ServerRoute
from lmi_server.dialects.unknown_fields import collect_ignored, refuse_ignored
from lmi_server.http.metrics import METER
from lmi_server.http.tenants import tenant_name
from lmi_server.models.loaded_model import LoadedModel
from lmi_server.models.model_registry import ModelRegistry

_MOST_LISTED, _USUALLY_LISTED = 100, 20


async def respond(request: web.Request, model: LoadedModel) -> web.StreamResponse:
    return await generate_with(request, model, partial(parse_response, model, tenant_name(request)))


async def count(request: web.Request, model: LoadedModel) -> web.Response:
    """The tokens of the prompt that a body would make, after the stored one that it may name."""
    with model.admission.enter():
        ignored = collect_ignored()
        call = Call(
            request_id=request[METER].request_id,
            body=await model.admission.read_body(request),
            content_type=request.headers.get("Content-Type", ""),
        )
        [asked] = (await parse_response(model, tenant_name(request), call)).requests
        if model.options.strict_requests:
            refuse_ignored(ignored)
        ids = asked.prompt_token_ids
        if ids is None:
            text, special = asked.prompt or "", asked.add_special_tokens
            ids = tuple(await model.tokenizes.encode(text, add_special_tokens=special))
    return web.json_response({"object": "response.input_tokens", "input_tokens": len(ids)})


async def get_stored(request: web.Request, models: ModelRegistry) -> web.Response:
    """What was answered before, for the tenant that asked for it."""
    if request.query.get("stream", "false") != "false":
        raise UserError("a stored response isn't streamed; leave stream out", field="stream")
    stored = models.responses.get(tenant_name(request), request.match_info["response"])
    return web.Response(body=stored.response, content_type="application/json")


async def delete_stored(request: web.Request, models: ModelRegistry) -> web.Response:
    name = request.match_info["response"]
    models.responses.delete(tenant_name(request), name)
    return web.json_response({"id": name, "object": "response", "deleted": True})


async def cancel(request: web.Request, models: ModelRegistry) -> web.Response:
    """There is nothing to cancel: a response that is stored has ended."""
    name = request.match_info["response"]
    models.responses.get(tenant_name(request), name)
    raise UserError(
        f"{name} has ended: only a response in the background could be cancelled, and background "
        "is not available here; close the connection of one that is being made",
        field="response_id",
    )


async def list_input(request: web.Request, models: ModelRegistry) -> web.Response:
    """The items of the whole conversation that a stored response answers."""
    name, query = request.match_info["response"], request.query
    stored = models.responses.get(tenant_name(request), name)
    tools = msgspec.json.decode(stored.response)["tools"]
    customs = frozenset(tool["name"] for tool in tools if tool.get("type") == "custom")
    items = items_of(msgspec.json.decode(stored.messages), customs, name.removeprefix("resp_"))
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise UserError(f"order must be asc or desc, got {order[:40]!r}", field="order")
    if order == "desc":
        items.reverse()
    page = page_of(items, query, usual=_USUALLY_LISTED, most=_MOST_LISTED, no_id="")
    return web.json_response(page)


async def compact(request: web.Request, models: ModelRegistry) -> web.Response:
    raise UserError(
        "conversations aren't compacted here: nothing could read what OpenAI encrypts; send the "
        "input without the items that are not needed any more, or a summary that a response makes",
        field="input",
    )


_STORED, _JSON = (
    r"/v1/responses/{response:(?!(?:input_tokens|compact)$)[^/]+}",
    ("application/json",),
)
RESPONSES_ROUTES = (
    ModelRoute(
        "POST",
        "/v1/responses",
        respond,
        "respond (OpenAI)",
        bodies=(ResponsesBody,),
        answers=(*_JSON, "text/event-stream"),
    ),
    ModelRoute(
        "POST",
        "/v1/responses/input_tokens",
        count,
        "tokens of a response's input",
        bodies=(ResponsesBody,),
        answers=_JSON,
    ),
    ServerRoute("POST", "/v1/responses/compact", compact, "refused", answers=_JSON),
    ServerRoute("GET", _STORED, get_stored, "a stored response", answers=_JSON),
    ServerRoute("DELETE", _STORED, delete_stored, "forget a stored response", answers=_JSON),
    ServerRoute(
        "GET", f"{_STORED}/input_items", list_input, "what a response answers", answers=_JSON
    ),
    ServerRoute("POST", f"{_STORED}/cancel", cancel, "refused: it has ended", answers=_JSON),
)
