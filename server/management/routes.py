"""The management API: register, describe, list, scale and unregister models while serving.

Paths, parameters, texts and statuses are DJL-Serving's (ManagementRequestHandler.java), which are
also those of SageMaker's multi-model endpoints.
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from lmi_core.errors import LmiError
from lmi_core.settings.placement import MAX_WORKERS
from lmi_server.dialects.base import HttpError
from lmi_server.dialects.routes import ServerRoute, management_route
from lmi_server.management.audit import SAID
from lmi_server.management.input import MAX_BODY_BYTES, bad_request, integer, truth
from lmi_server.management.output import (
    MAX_PAGE,
    description,
    json_answer,
    listing,
    load_error,
    status_answer,
)
from lmi_server.models.backend import Scales
from lmi_server.models.model import ModelState, Recipe, ServedModel
from lmi_server.models.model_registry import ModelRegistry

_MAX_PARAMETERS = 1000
_JSON = msgspec.json.Decoder(dict[str, str | int | float | bool | None])


async def register(request: web.Request, models: ModelRegistry) -> web.Response:
    """Load a model: 200 once it answers requests, or 202 at once if not ``synchronous``. With
    ``replace`` it takes the place of the one of its name and version, without a lost request."""
    arguments = await _arguments(request, models)
    waits = truth(arguments.pop("synchronous", "true"), "synchronous")
    replaces = truth(arguments.pop("replace", "false"), "replace")
    registrar = models.registrar
    if registrar is None:
        raise bad_request("This server loads no models while it runs")
    try:
        recipe = await registrar.recipe(arguments)
    except LmiError as error:
        raise load_error(error) from error
    same = [m for m in models.versions(recipe.name) if m.version == recipe.version]
    if replaces and same:
        return await _replace(models, same[0], recipe, waits=waits)
    if models.has(recipe.name, recipe.version):
        message = f"Workflow {recipe.label} is already registered."
        raise HttpError(409, "BadRequestException", message)
    model = models.add(recipe)
    if not waits:
        models.run(models.load(model, keep_failed=True))
        return status_answer(f'Model "{model.name}" registration scheduled.', 202)
    try:
        await models.load(model, keep_failed=False)
    except (LmiError, MemoryError, OSError) as error:
        raise load_error(error) from error
    return status_answer(f'Model "{model.name}" registered.')


async def _replace(
    models: ModelRegistry, model: ServedModel, recipe: Recipe, *, waits: bool
) -> web.Response:
    if not waits:
        models.run(models.replace(model, recipe))
        return status_answer(f'Model "{model.name}" replacement scheduled.', 202)
    try:
        await models.replace(model, recipe)
    except (LmiError, MemoryError, OSError) as error:
        raise load_error(error) from error
    return status_answer(f'Model "{model.name}" replaced.')


async def list_models(request: web.Request, models: ModelRegistry) -> web.Response:
    limit = integer(request.query.get("limit", str(MAX_PAGE)), "limit")
    start = integer(request.query.get("next_page_token", "0"), "next_page_token")
    return json_answer(listing(list(models), limit, max(0, start)))


async def describe(request: web.Request, models: ModelRegistry) -> web.Response:
    return json_answer([description(model) for model in _found(request, models)])


async def scale(request: web.Request, models: ModelRegistry) -> web.Response:
    """A handler or a model in copies gets more or fewer processes; a model's one engine is stopped
    or started."""
    query = request.query
    for model in _found(request, models):
        least = integer(query.get("min_worker", str(model.min_workers)), "min_worker")
        usual = model.max_workers or model.recipe.max_workers
        most = integer(query.get("max_worker", str(max(least, usual))), "max_worker")
        _check_workers(least, most, has_processes=model.recipe.has_processes)
        if query.get("device", "cpu") not in ("cpu", "-1", "*"):
            raise bad_request(
                f"device {query['device'][:40]} is not available in this version; models run on cpu"
            )
        if model.state is ModelState.LOADING:
            raise HttpError(503, "WlmException", f"Model is not ready: {model.name}")
        await _set_workers(models, model, least, most)
    name = request.match_info["model"]
    return status_answer(
        f'Workflow "{name}" worker scaled. New Worker configuration min workers:{least} '
        f"max workers:{most}"
    )


async def unregister(request: web.Request, models: ModelRegistry) -> web.Response:
    """Answers once running requests have ended and the model's memory is free."""
    for model in _found(request, models):
        await models.remove(model)
    return status_answer(f'Model or workflow "{request.match_info["model"]}" unregistered')


async def _set_workers(models: ModelRegistry, model: ServedModel, least: int, most: int) -> None:
    before = model.min_workers, model.max_workers
    model.min_workers, model.max_workers = least, most
    if most == 0 and model.state is not ModelState.STOPPED:
        await models.stop(model)
    elif most and model.state in (ModelState.STOPPED, ModelState.FAILED):
        try:
            await models.load(model, keep_failed=True)
        except (LmiError, MemoryError, OSError) as error:
            raise load_error(error) from error
    backend = None if model.loaded is None else model.loaded.backend
    if isinstance(backend, Scales):
        try:
            await backend.scale(least, most)
        except (LmiError, MemoryError, OSError) as error:
            model.min_workers, model.max_workers = before
            raise load_error(error) from error


def _found(request: web.Request, models: ModelRegistry) -> list[ServedModel]:
    """The model of the path: one version, or all of them."""
    name, version = request.match_info["model"], request.match_info.get("version")
    found = [m for m in models.versions(name) if version in (None, m.version)]
    if not found:
        full_name = name if version is None else f"{name}:{version}"
        message = f"Model or workflow not found: {full_name[:200]}"
        raise HttpError(404, "ModelNotFoundException", message)
    return found


async def _arguments(request: web.Request, models: ModelRegistry) -> dict[str, str]:
    """The query's parameters, or those of a JSON body, which needs ``model_name``."""
    if not request.content_type.endswith("json") or not request.can_read_body:
        return {name: value for name, value in request.query.items() if value}
    body = await models.admission.read_body(request, MAX_BODY_BYTES)
    try:
        given = _JSON.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise bad_request(f"The body is not an object of plain values: {error}") from None
    if len(given) > _MAX_PARAMETERS:
        raise bad_request(f"The body has {len(given)} parameters; at most {_MAX_PARAMETERS} may be")
    arguments = {name: _text(value) for name, value in given.items() if value is not None}
    request[SAID].update(arguments)
    if "url" in arguments and "model_name" not in arguments:
        raise bad_request("Parameter model_name is required.")
    return arguments


def _check_workers(least: int, most: int, *, has_processes: bool) -> None:
    if not 0 <= least <= most:
        raise bad_request(
            f"min_worker={least} and max_worker={most}: 0 <= min_worker <= max_worker must hold"
        )
    if most > MAX_WORKERS:
        raise bad_request(
            f"min_worker={least} and max_worker={most}: at most {MAX_WORKERS} are allowed"
        )
    if most > 1 and not has_processes:
        raise bad_request(
            f"max_worker={most}: one engine in the server's own process serves the model, and "
            "takes as many requests as its batch holds; allowed are 0 and 1, and any number for a "
            "model that is served with option.num_copies"
        )


def _text(value: str | float | bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


MANAGEMENT_ROUTES: tuple[ServerRoute, ...] = (
    management_route("POST", "/models", register, "register a model"),
    management_route("GET", "/models", list_models, "list models"),
    *(
        management_route(method, path, answer, purpose)
        for path in ("/models/{model}", "/models/{model}/{version:(?!adapters$)[^/]+}")
        for method, answer, purpose in (
            ("GET", describe, "describe a model"),
            ("PUT", scale, "scale a model"),
            ("DELETE", unregister, "unregister a model"),
        )
    ),
)
