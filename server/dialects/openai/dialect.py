"""OpenAI's routes, with those for tokens and health that open servers add."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial

from aiohttp import web

from lmi_core.version import __version__
from lmi_server.batches.routes import BATCH_ROUTES
from lmi_server.dialects.generation import generate
from lmi_server.dialects.lmi.custom_code_calls import call_custom_code
from lmi_server.dialects.openai.chat_schema import ChatBody
from lmi_server.dialects.openai.completion_schema import CompletionBody
from lmi_server.dialects.openai.embeddings import POOLING_ROUTES
from lmi_server.dialects.openai.errors import ModelNotFound, openai_error
from lmi_server.dialects.openai.openai import parse_chat, parse_completion
from lmi_server.dialects.openai.responses_routes import RESPONSES_ROUTES
from lmi_server.dialects.openai.token_routes import TOKEN_ROUTES
from lmi_server.dialects.routes import ModelRoute, ServerAnswer, ServerRoute, metrics_route
from lmi_server.dialects.table import USUAL_STATUSES, Dialect, ErrorForm
from lmi_server.http.openapi import openapi_route
from lmi_server.management.lora_routes import LORA_ROUTES
from lmi_server.models.custom_code_backend import CustomCodeBackend
from lmi_server.models.loaded_model import LoadedModel
from lmi_server.models.model import ServedModel
from lmi_server.models.model_adapters import Adapter
from lmi_server.models.model_registry import ModelRegistry

_JSON = ("application/json",)
_ANSWERS = (*_JSON, "text/event-stream")
_STRING_OR_NULL = {"type": ["string", "null"]}
_ERRORS = ErrorForm(
    schema={
        "type": "object",
        "properties": {
            "error": {
                "type": "object",
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": _STRING_OR_NULL,
                    "code": _STRING_OR_NULL,
                },
                "required": ["message", "type", "param", "code"],
            }
        },
        "required": ["error"],
    },
    statuses=USUAL_STATUSES,
)


async def chat(request: web.Request, model: LoadedModel) -> web.StreamResponse:
    backend = model.backend
    if isinstance(backend, CustomCodeBackend) and model.options.api == "lmi":
        # As on /invocations, by the path that chats have.
        return await call_custom_code(request, model, backend)
    return await generate(request, model, partial(parse_chat, model))


async def complete(request: web.Request, model: LoadedModel) -> web.StreamResponse:
    return await generate(request, model, partial(parse_completion, model))


async def list_models(request: web.Request, models: ModelRegistry) -> web.Response:
    served = _served(models)
    names = list(served)
    ends = {"has_more": False, "first_id": names[0], "last_id": names[-1]} if names else {}
    return web.json_response({"object": "list", "data": list(served.values()), **ends})


async def describe_model(request: web.Request, models: ModelRegistry) -> web.Response:
    name, served = request.match_info["model"], _served(models)
    if name not in served:
        raise ModelNotFound(name, f"{', '.join(map(repr, served)) or 'nothing'} is served here")
    return web.json_response(served[name])


async def version(request: web.Request, models: ModelRegistry) -> web.Response:
    return web.json_response({"version": __version__})


async def load(request: web.Request, models: ModelRegistry) -> web.Response:
    return web.json_response({"server_load": models.num_in_flight})


async def health(request: web.Request, models: ModelRegistry) -> web.Response:
    """200 while every engine works, else 503; no body."""
    healthy = all(model.takes_requests for model in models)
    return web.Response(status=200 if healthy else 503)


def _served(models: ModelRegistry) -> dict[str, dict[str, object]]:
    """The models that answer requests, and their adapters, by name: versions of one name are one
    model to a client; a model's name beats an adapter's."""
    served = {model.name: model for model in models if model.loaded is not None}
    cards = {name: _model(model) for name, model in served.items()}
    for model in served.values():
        for adapter in model.adapters:
            cards.setdefault(adapter.name, _adapter(adapter, model))
    return cards


def _model(model: ServedModel) -> dict[str, object]:
    """With what Anthropic's clients read of one, too, who ask the same route."""
    return {
        "id": model.name,
        "object": "model",
        "created": int(model.loaded_at),
        "owned_by": "lmi",
        "max_model_len": 0 if model.loaded is None else model.loaded.max_model_len,
        "type": "model",
        "display_name": model.name,
        "created_at": f"{datetime.fromtimestamp(int(model.loaded_at), UTC):%Y-%m-%dT%H:%M:%SZ}",
    }


def _adapter(adapter: Adapter, model: ServedModel) -> dict[str, object]:
    """As vLLM lists adapters: with their directory and the model that they adapt."""
    name = adapter.name
    own = {"id": name, "display_name": name, "root": adapter.src, "parent": model.name}
    return {**_model(model), **own}


def _get(path: str, answer: ServerAnswer, purpose: str) -> ServerRoute:
    return ServerRoute("GET", path, answer, purpose, answers=_JSON)


OPENAI = Dialect(
    name="openai",
    routes=(
        ModelRoute(
            "POST",
            "/v1/chat/completions",
            chat,
            "chat (OpenAI)",
            bodies=(ChatBody,),
            answers=_ANSWERS,
        ),
        ModelRoute(
            "POST",
            "/v1/completions",
            complete,
            "complete a text (OpenAI)",
            bodies=(CompletionBody,),
            answers=_ANSWERS,
        ),
        *POOLING_ROUTES,
        *RESPONSES_ROUTES,
        *BATCH_ROUTES,
        _get("/v1/models", list_models, "models (OpenAI)"),
        _get("/v1/models/{model:.+}", describe_model, "one model (OpenAI)"),
        *LORA_ROUTES,
        _get("/version", version, "version"),
        _get("/load", load, "requests being served"),
        *TOKEN_ROUTES,
        ServerRoute("GET", "/health", health, "health", is_open=True),
        metrics_route(),
        openapi_route(),
    ),
    error=lambda error, _: openai_error(error),
    errors=_ERRORS,
)
