"""Management of LoRA adapters while serving (AdapterManagementRequestHandler.java).

Paths, bodies and statuses are those of DJL-Serving's newest release. Every registered adapter is
in memory, so that ``preload`` and ``pin`` are kept and change nothing. Under ``/adapters`` the
model is the only one of the start.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace

from aiohttp import web

from lmi_core.errors import InsufficientMemoryError, LmiError, UserError
from lmi_server.dialects.base import HttpError
from lmi_server.dialects.routes import ServerRoute, management_route
from lmi_server.management.input import bad_request, integer, truth
from lmi_server.management.output import (
    MAX_PAGE,
    adapter_description,
    adapter_listing,
    json_answer,
    load_error,
    status_answer,
)
from lmi_server.models.model import ModelState, ServedModel
from lmi_server.models.model_adapters import Adapter
from lmi_server.models.model_registry import ModelRegistry, Registrar

_ALIAS = "X-Amzn-SageMaker-Adapter-Alias"
_REGISTER = ("name", "src", "preload", "pin")
_UPDATE = ("src", "preload", "pin")
_NAME = re.compile(r"[\w][\w.:@+=/-]{0,199}")


async def register(request: web.Request, models: ModelRegistry) -> web.Response:
    """Answers once requests may name the adapter."""
    model = model_of(request, models)
    query = _arguments(request, _REGISTER)
    name, src = (_required(query, parameter) for parameter in ("name", "src"))
    check_name(name)
    if model.adapters.get(name) is not None:
        message = f"Adapter {_shown(request, name)} is already registered."
        raise HttpError(409, "BadRequestException", message)
    try:
        path = registrar_of(models).adapter_path(src, model.recipe.url)
        adapter = _with_options(Adapter(name=name, src=src, path=path), query)
        await model.adapters.register(adapter)
    except (LmiError, MemoryError, OSError) as error:
        raise _failure(error) from error
    return status_answer(f"Adapter {_shown(request, name)} registered")


async def update(request: web.Request, models: ModelRegistry) -> web.Response:
    model = model_of(request, models)
    adapter = _adapter(request, model)
    query = _arguments(request, _UPDATE)
    if query.get("src", adapter.src) != adapter.src:
        message = (
            "Updating adapter path is not supported; unregister the adapter and register it "
            f"from {query['src'][:200]}"
        )
        raise HttpError(424, "ModelException", message)
    model.adapters.update(_with_options(adapter, query))
    return status_answer(f"Adapter {_shown(request, adapter.name)} updated")


async def list_adapters(request: web.Request, models: ModelRegistry) -> web.Response:
    adapters = list(model_of(request, models).adapters)
    limit = integer(request.query.get("limit", str(MAX_PAGE)), "limit")
    start = integer(request.query.get("next_page_token", "0"), "next_page_token")
    return json_answer(adapter_listing(adapters, limit, max(0, start)))


async def describe(request: web.Request, models: ModelRegistry) -> web.Response:
    return json_answer(adapter_description(_adapter(request, model_of(request, models))))


async def unregister(request: web.Request, models: ModelRegistry) -> web.Response:
    """Answers once running requests with the adapter have ended and its memory is free."""
    model = model_of(request, models)
    adapter = _adapter(request, model)
    await model.adapters.unregister(adapter.name)
    return status_answer(f"Adapter {_shown(request, adapter.name)} unregistered")


def registrar_of(models: ModelRegistry) -> Registrar:
    """What says which adapters may be loaded; HttpError where none may."""
    if models.registrar is None:
        raise bad_request("This server loads no adapters while it runs")
    return models.registrar


def model_of(request: web.Request, models: ModelRegistry) -> ServedModel:
    """The model of the path, running and with LoRA."""
    name = request.match_info.get("model")
    if name is None:
        default = models.default
        if default is None:
            raise bad_request(
                "The adapter must be prefixed with a model unless there is only a single "
                "startup model used."
            )
        found = [default]
    else:
        found = models.versions(name)
        if not found:
            message = f"The model {name[:200]} was not found"
            raise HttpError(404, "ModelNotFoundException", message)
    if len(found) > 1:
        raise bad_request(
            f"The model {found[0].name} has {len(found)} versions; adapters can be managed "
            "while a model has one"
        )
    (model,) = found
    if model.state is not ModelState.READY:
        raise HttpError(503, "WlmException", f"Model is not ready: {model.name}")
    if not model.adapters.is_enabled:
        raise bad_request("LoRA is not enabled.")
    return model


def _adapter(request: web.Request, model: ServedModel) -> Adapter:
    name = request.match_info["adapter"]
    adapter = model.adapters.get(name)
    if adapter is None:
        message = f"The adapter {_shown(request, name)} was not found"
        raise HttpError(404, "ModelNotFoundException", message)
    return adapter


def _arguments(request: web.Request, known: Collection[str]) -> Mapping[str, str]:
    query = {name: value for name, value in request.query.items() if value}
    for name in query:
        if name not in known:
            raise bad_request(f"Parameter {name[:40]!r} is unknown; known are {', '.join(known)}")
    return query


def _required(query: Mapping[str, str], name: str) -> str:
    if name not in query:
        raise bad_request(f"Parameter {name} is required.")
    return query[name]


def check_name(name: str) -> None:
    """Names stand in paths, logs and lists of models."""
    if not _NAME.fullmatch(name) or name.endswith("/update"):
        raise bad_request(
            f"Parameter name is {name[:40]!r}; it must be 1 to 200 letters, digits and ._:@+=/-, "
            "begin with a letter, a digit or _, and not end with /update"
        )


def _with_options(adapter: Adapter, query: Mapping[str, str]) -> Adapter:
    given = {name: truth(query[name], name) for name in ("preload", "pin") if name in query}
    adapter = replace(
        adapter,
        preload=given.get("preload", adapter.preload),
        pin=given.get("pin", adapter.pin),
    )
    if adapter.pin and not adapter.preload:
        raise HttpError(424, "ModelException", "Can not set preload to false and pin to true")
    return adapter


def _shown(request: web.Request, name: str) -> str:
    """How messages call an adapter: by the alias that SageMaker has for it, or by its name."""
    return (request.headers.get(_ALIAS) or name)[:200]


def _failure(error: Exception) -> HttpError:
    """An adapter that the model can't take; DJL-Serving answers with its handler's code."""
    if isinstance(error, UserError) and not isinstance(error, InsufficientMemoryError):
        return HttpError(424, "ModelException", str(error))
    return load_error(error)


_ONE = "/adapters/{adapter:(?!.*/update$).+}"
ADAPTER_ROUTES: tuple[ServerRoute, ...] = tuple(
    management_route(method, prefix + path, answer, purpose)
    for prefix in ("", "/models/{model}")
    for method, path, answer, purpose in (
        ("POST", "/adapters", register, "register an adapter"),
        ("GET", "/adapters", list_adapters, "list adapters"),
        ("POST", "/adapters/{adapter:.+}/update", update, "update an adapter"),
        ("GET", _ONE, describe, "describe an adapter"),
        ("DELETE", _ONE, unregister, "unregister an adapter"),
    )
)
