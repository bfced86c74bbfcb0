"""OpenAI's routes, with those for tokens and health that open servers add."""

from __future__ import annotations

import time

from aiohttp import web

from lmi_server.dialects import Dialect
from lmi_server.protocols.openai import OpenAIProtocol
from lmi_server.protocols.openai_errors import ModelNotFound, openai_error
from lmi_server.routes import GenerationHandler, Route, Service, metrics_route
from lmi_server.token_routes import TokenHandler


def openai_dialect(service: Service) -> Dialect:
    options, backend = service.options, service.backend
    protocol = OpenAIProtocol(options.model_name, options.chat_template, decode=backend.decode)
    models = ModelsHandler(service)
    tokens = TokenHandler(service, protocol)
    completion = GenerationHandler(service, protocol.parse_completion)
    chat = GenerationHandler(service, protocol.parse_chat)
    routes = (
        Route("POST", "/v1/chat/completions", chat.handle, "chat (OpenAI)"),
        Route("POST", "/v1/completions", completion.handle, "complete a text (OpenAI)"),
        Route("GET", "/v1/models", models.list_models, "models (OpenAI)"),
        Route("GET", "/v1/models/{model:.+}", models.describe, "one model (OpenAI)"),
        Route("POST", "/tokenize", tokens.tokenize, "token ids of a text or chat"),
        Route("POST", "/detokenize", tokens.detokenize, "text of token ids"),
        Route("GET", "/health", HealthHandler(service).handle, "health", is_open=True),
        metrics_route(service),
    )
    return Dialect(name="openai", routes=routes, error=openai_error)


class ModelsHandler:
    """The one model that is served."""

    def __init__(self, service: Service) -> None:
        self._backend = service.backend
        self._name = service.options.model_name
        self._created = int(time.time())

    async def list_models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._model()]})

    async def describe(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        if name != self._name:
            raise ModelNotFound(name, self._name)
        return web.json_response(self._model())

    def _model(self) -> dict[str, object]:
        return {
            "id": self._name,
            "object": "model",
            "created": self._created,
            "owned_by": "lmi",
            "max_model_len": self._backend.max_model_len,
        }


class HealthHandler:
    """200 while the engine works, else 503; no body."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self._service.backend.healthy else 503)
