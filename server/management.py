"""The management API: register, describe, list, scale and unregister models while serving.

Paths, parameters, texts and statuses are DJL-Serving's (LMI format reference, 3.8), which are also
those of SageMaker's multi-model endpoints (3.9).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from lmi_core.errors import EngineError, InsufficientMemoryError, LmiError, UserError
from lmi_server.handler_backend import HandlerBackend
from lmi_server.management_output import MAX_PAGE, description, listing
from lmi_server.model import ModelState, ServedModel
from lmi_server.protocols.base import HttpError
from lmi_server.protocols.lmi import pretty_json
from lmi_server.routes import Handler, Route, Service

if TYPE_CHECKING:
    from lmi_server.model_registry import ModelRegistry

_TRUE, _FALSE = ("true", "1"), ("false", "0")
_JSON = msgspec.json.Decoder(dict[str, str | int | float | bool | None])


def management_routes(service: Service) -> tuple[Route, ...]:
    handler = ManagementHandler(service)
    adapters = AdapterHandler(service)

    def route(method: str, path: str, handle: Handler, purpose: str) -> Route:
        return Route(
            method,
            path,
            handle,
            purpose,
            is_server_wide=True,
            is_management=True,
            answers=("application/json",),
        )

    return (
        route("POST", "/models", handler.register, "register a model"),
        route("GET", "/models", handler.list_models, "list models"),
        *(
            route("*", path, adapters.handle, "adapters (none in this version)")
            for path in (
                "/adapters",
                "/adapters/{adapter:.+}",
                "/models/{model}/adapters",
                "/models/{model}/adapters/{adapter:.+}",
            )
        ),
        *(
            route(method, path, handle, purpose)
            for path in ("/models/{model}", "/models/{model}/{version}")
            for method, handle, purpose in (
                ("GET", handler.describe, "describe a model"),
                ("PUT", handler.scale, "scale a model"),
                ("DELETE", handler.unregister, "unregister a model"),
            )
        ),
    )


class ManagementHandler:
    """Handlers of the routes under ``/models``."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._models: ModelRegistry = service.models

    async def register(self, request: web.Request) -> web.Response:
        """Load a model: 200 once it answers requests, or 202 at once if not ``synchronous``."""
        arguments = await self._arguments(request)
        waits = _truth(arguments.pop("synchronous", "true"), "synchronous")
        registrar = self._models.registrar
        if registrar is None:
            raise _bad_request("This server loads no models while it runs")
        try:
            recipe = await registrar.recipe(arguments)
        except LmiError as error:
            raise load_error(error) from error
        if self._models.has(recipe.name, recipe.version):
            message = f"Workflow {recipe.label} is already registered."
            raise HttpError(409, "BadRequestException", message)
        model = self._models.add(recipe)
        if not waits:
            self._models.run(self._models.load(model, keep_failed=True))
            return _status(f'Model "{model.name}" registration scheduled.', 202)
        try:
            await self._models.load(model, keep_failed=False)
        except (LmiError, MemoryError, OSError) as error:
            raise load_error(error) from error
        return _status(f'Model "{model.name}" registered.')

    async def list_models(self, request: web.Request) -> web.Response:
        limit = _integer(request.query.get("limit", str(MAX_PAGE)), "limit")
        start = _integer(request.query.get("next_page_token", "0"), "next_page_token")
        return _json(listing(list(self._models), limit, max(0, start)))

    async def describe(self, request: web.Request) -> web.Response:
        return _json([description(model) for model in self._found(request)])

    async def scale(self, request: web.Request) -> web.Response:
        """A handler gets more or fewer processes; a model's one engine is stopped or started."""
        query = request.query
        for model in self._found(request):
            least = _integer(query.get("min_worker", str(model.min_workers)), "min_worker")
            usual = model.max_workers or model.recipe.max_workers
            most = _integer(query.get("max_worker", str(max(least, usual))), "max_worker")
            _check_workers(least, most, has_processes=model.recipe.has_processes)
            if query.get("device", "cpu") not in ("cpu", "-1", "*"):
                raise _bad_request(
                    f"device {query['device'][:40]} is not available in this version; "
                    "models run on cpu"
                )
            if model.state is ModelState.LOADING:
                raise HttpError(503, "WlmException", f"Model is not ready: {model.name}")
            await self._set_workers(model, least, most)
        name = request.match_info["model"]
        return _status(
            f'Workflow "{name}" worker scaled. New Worker configuration min workers:{least} '
            f"max workers:{most}"
        )

    async def unregister(self, request: web.Request) -> web.Response:
        """Answers once running requests have ended and the model's memory is free."""
        for model in self._found(request):
            await self._models.remove(model)
        return _status(f'Model or workflow "{request.match_info["model"]}" unregistered')

    async def _set_workers(self, model: ServedModel, least: int, most: int) -> None:
        model.min_workers, model.max_workers = least, most
        if most == 0 and model.state is not ModelState.STOPPED:
            await self._models.stop(model)
        elif most and model.state in (ModelState.STOPPED, ModelState.FAILED):
            try:
                await self._models.load(model, keep_failed=True)
            except (LmiError, MemoryError, OSError) as error:
                raise load_error(error) from error
        if model.endpoint is not None and isinstance(model.backend, HandlerBackend):
            model.backend.pool.scale(least, most)

    def _found(self, request: web.Request) -> list[ServedModel]:
        """The model of the path: one version, or all of them."""
        name, version = request.match_info["model"], request.match_info.get("version")
        found = [m for m in self._models.versions(name) if version in (None, m.version)]
        if not found:
            full_name = name if version is None else f"{name}:{version}"
            message = f"Model or workflow not found: {full_name[:200]}"
            raise HttpError(404, "ModelNotFoundException", message)
        return found

    async def _arguments(self, request: web.Request) -> dict[str, str]:
        """The query's parameters, or those of a JSON body, which needs ``model_name``."""
        if not request.content_type.endswith("json") or not request.can_read_body:
            return {name: value for name, value in request.query.items() if value}
        body = await self._service.admission.read_body(request)
        try:
            given = _JSON.decode(body)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise _bad_request(f"The body is not an object of plain values: {error}") from None
        arguments = {name: _text(value) for name, value in given.items() if value is not None}
        if "url" in arguments and "model_name" not in arguments:
            raise _bad_request("Parameter model_name is required.")
        return arguments


class AdapterHandler:
    """There are no adapters: every route of theirs says so."""

    def __init__(self, service: Service) -> None:
        self._models = service.models

    async def handle(self, request: web.Request) -> web.Response:
        name = request.match_info.get("model")
        if name is not None and not self._models.versions(name):
            message = f"The model {name[:200]} was not found"
            raise HttpError(404, "ModelNotFoundException", message)
        raise _bad_request("LoRA is not enabled.")


def _check_workers(least: int, most: int, *, has_processes: bool) -> None:
    if not 0 <= least <= most:
        raise _bad_request(
            f"min_worker={least} and max_worker={most}: 0 <= min_worker <= max_worker must hold"
        )
    if most > 1 and not has_processes:
        raise _bad_request(
            f"max_worker={most} is not available in this version: one engine serves a model, and "
            "takes as many requests as its batch holds; allowed are 0 and 1"
        )


def load_error(error: Exception) -> HttpError:
    """How a model that can't be loaded is reported; what nobody expected is left to be a 500."""
    message = str(error)
    match error:
        case HttpError():
            return error
        case InsufficientMemoryError() | MemoryError():
            return HttpError(507, "WlmOutOfMemoryException", message)
        case UserError():
            return HttpError(400, "ModelException", message)
        case EngineError():
            return HttpError(500, "EngineException", message)
        case _:
            return HttpError(500, type(error).__name__, message)


def _bad_request(message: str) -> HttpError:
    return HttpError(400, "BadRequestException", message)


def _integer(text: str, name: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise _bad_request(f"Parameter {name} is not a number: {text[:40]!r}") from None


def _truth(text: str, name: str) -> bool:
    if text.lower() in (*_TRUE, *_FALSE):
        return text.lower() in _TRUE
    raise _bad_request(f"Parameter {name} is {text[:40]!r}; allowed are true and false")


def _text(value: str | float | bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _status(text: str, status: int = 200) -> web.Response:
    return _json({"status": text}, status)


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=pretty_json(value), content_type="application/json")
