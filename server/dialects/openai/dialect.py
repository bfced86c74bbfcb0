"""OpenAI's routes, with those for tokens and health that open servers add."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web

from lmi_core.version import __version__
from lmi_server.dialects.base import no_adapters
from lmi_server.dialects.lmi.custom_code_calls import CustomCodeCalls
from lmi_server.dialects.openai.chat_schema import ChatBody
from lmi_server.dialects.openai.completion_schema import CompletionBody, infill_of
from lmi_server.dialects.openai.errors import ModelNotFound, openai_error
from lmi_server.dialects.openai.openai import OpenAIProtocol
from lmi_server.dialects.openai.responses import responses_routes
from lmi_server.dialects.openai.token_routes import DetokenizeBody, TokenHandler, TokenizeBody
from lmi_server.dialects.routes import GenerationHandler, Handler, Route, Service, metrics_route
from lmi_server.dialects.table import Dialect, ErrorForm
from lmi_server.http.openapi import openapi_route
from lmi_server.management.lora_routes import lora_routes
from lmi_server.models.custom_code_backend import CustomCodeBackend

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
    statuses={
        400: "the request can't be served as written",
        401: "the API key is missing or wrong",
        404: "no such route or model",
        405: "wrong method",
        408: "the body came too slowly",
        413: "the body is too long",
        415: "the body isn't JSON",
        429: "the server is full",
        500: "the server failed",
        503: "the server is not ready or stopping",
    },
)

if TYPE_CHECKING:
    from lmi_server.models.model import ServedModel
    from lmi_server.models.model_adapters import Adapter


def openai_dialect(service: Service) -> Dialect:
    options, backend = service.options, service.backend
    protocol = OpenAIProtocol(
        options.model_name,
        options.chat_template,
        decode=backend.decode,
        infill=partial(infill_of, backend),
        adapters=service.adapter_names or no_adapters,
    )
    models = ModelsHandler(service)
    tokens = TokenHandler(service, protocol)
    completion = GenerationHandler(service, protocol.parse_completion)
    chat: GenerationHandler | CustomCodeCalls = GenerationHandler(service, protocol.parse_chat)
    if isinstance(backend, CustomCodeBackend) and options.api == "lmi":
        chat = CustomCodeCalls(service, backend)  # As on /invocations, by the path that chats have.

    def post(path: str, handler: Handler, purpose: str, *bodies: type) -> Route:
        answers = _ANSWERS if path.startswith("/v1/") else _JSON
        return Route("POST", path, handler, purpose, bodies=bodies, answers=answers)

    def get(
        path: str, handler: Handler, purpose: str, *answers: str, is_open: bool = False
    ) -> Route:
        return Route(
            "GET", path, handler, purpose, is_open=is_open, is_server_wide=True, answers=answers
        )

    routes = (
        post("/v1/chat/completions", chat.handle, "chat (OpenAI)", ChatBody),
        post("/v1/completions", completion.handle, "complete a text (OpenAI)", CompletionBody),
        *responses_routes(service, protocol),
        get("/v1/models", models.list_models, "models (OpenAI)", *_JSON),
        get("/v1/models/{model:.+}", models.describe, "one model (OpenAI)", *_JSON),
        *lora_routes(service),
        get("/version", models.version, "version", *_JSON),
        get("/load", models.load, "requests being served", *_JSON),
        Route("GET", "/tokenizer_info", tokens.information, "tokenizer", answers=_JSON),
        post("/tokenize", tokens.tokenize, "token ids of a text or chat", TokenizeBody, ChatBody),
        post("/detokenize", tokens.detokenize, "text of token ids", DetokenizeBody),
        get("/health", HealthHandler(service).handle, "health", is_open=True),
        metrics_route(service),
        openapi_route(),
    )
    return Dialect(name="openai", routes=routes, error=openai_error, errors=_ERRORS)


class ModelsHandler:
    """The models that answer requests, and their adapters; versions of one name are one model to a
    client. Also what there is to say of the server itself, by vLLM's routes."""

    def __init__(self, service: Service) -> None:
        self._models = service.models

    async def list_models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": list(self._served().values())})

    async def describe(self, request: web.Request) -> web.Response:
        name, served = request.match_info["model"], self._served()
        if name not in served:
            raise ModelNotFound(name, f"{', '.join(map(repr, served)) or 'nothing'} is served here")
        return web.json_response(served[name])

    async def version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": __version__})

    async def load(self, request: web.Request) -> web.Response:
        return web.json_response({"server_load": self._models.num_in_flight})

    def _served(self) -> dict[str, dict[str, object]]:
        """By name; a model's name beats an adapter's."""
        models = {model.name: model for model in self._models if model.endpoint is not None}
        cards = {name: _model(model) for name, model in models.items()}
        for model in models.values():
            for adapter in model.adapters:
                cards.setdefault(adapter.name, _adapter(adapter, model))
        return cards


def _model(model: ServedModel) -> dict[str, object]:
    return {
        "id": model.name,
        "object": "model",
        "created": int(model.loaded_at),
        "owned_by": "lmi",
        "max_model_len": model.backend.max_model_len,
    }


def _adapter(adapter: Adapter, model: ServedModel) -> dict[str, object]:
    """As vLLM lists adapters: with their directory and the model that they adapt."""
    return {**_model(model), "id": adapter.name, "root": adapter.src, "parent": model.name}


class HealthHandler:
    """200 while every engine works, else 503; no body."""

    def __init__(self, service: Service) -> None:
        self._models = service.models

    async def handle(self, request: web.Request) -> web.Response:
        healthy = all(model.takes_requests for model in self._models)
        return web.Response(status=200 if healthy else 503)
