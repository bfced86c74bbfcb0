"""OpenAI's routes."""

from __future__ import annotations

import time

from aiohttp import web

from lmi_server.dialects import Dialect
from lmi_server.protocols.openai_errors import ModelNotFound, openai_error
from lmi_server.routes import Route, Service, metrics_route


def openai_dialect(service: Service) -> Dialect:
    models = ModelsHandler(service)
    routes = (
        Route("GET", "/v1/models", models.list_models, "models (OpenAI)"),
        Route("GET", "/v1/models/{model:.+}", models.describe, "one model (OpenAI)"),
        Route("GET", "/health", HealthHandler(service).handle, "health", is_open=True),
        metrics_route(service),
    )
    return Dialect(name="openai", routes=routes, error=openai_error)


class ModelsHandler:
    """The one model that is served."""

    def __init__(self, service: Service) -> None:
        self._name = service.options.model_name
        self._model = {
            "id": self._name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "lmi",
        }

    async def list_models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._model]})

    async def describe(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        if name != self._name:
            raise ModelNotFound(name, self._name)
        return web.json_response(self._model)


class HealthHandler:
    """200 while the engine works, else 503; no body."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self._service.backend.healthy else 503)
