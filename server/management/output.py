"""What the management routes say about models and adapters (ManagementRequestHandler.java)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from aiohttp import web

from lmi_core.errors import EngineError, InsufficientMemoryError, UserError
from lmi_server.dialects.base import HttpError
from lmi_server.dialects.lmi.errors import pretty_json
from lmi_server.models.backend import Scales
from lmi_server.models.model import ModelState, ServedModel
from lmi_server.models.model_adapters import Adapter

T = TypeVar("T")

MAX_PAGE = 100


def listing(models: Sequence[ServedModel], limit: int, start: int) -> dict[str, object]:
    """A page of at most ``limit`` models, those from index ``start`` on."""
    return _page("models", models, _entry, limit, start)


def adapter_listing(adapters: Sequence[Adapter], limit: int, start: int) -> dict[str, object]:
    """As ``listing``, of a model's adapters."""

    def entry(adapter: Adapter) -> dict[str, object]:
        place: dict[str, object] = {"name": adapter.name, "src": adapter.src}
        return {**place, "preload": adapter.preload, "pin": adapter.pin}

    return _page("adapters", adapters, entry, limit, start)


def adapter_description(adapter: Adapter) -> dict[str, object]:
    return {"name": adapter.name, "src": adapter.src, "pin": adapter.pin}


def description(model: ServedModel) -> dict[str, object]:
    """A model as a workflow of its own, which is how DJL-Serving sees it."""
    return {
        "workflowName": model.name,
        **({} if model.version is None else {"version": model.version}),
        "models": [_details(model)],
    }


def status_answer(text: str, status: int = 200) -> web.Response:
    return json_answer({"status": text}, status)


def json_answer(value: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=pretty_json(value), content_type="application/json")


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


def _page(
    key: str, items: Sequence[T], entry: Callable[[T], object], limit: int, start: int
) -> dict[str, object]:
    limit = limit if 0 <= limit <= MAX_PAGE else MAX_PAGE
    page: dict[str, object] = {key: [entry(item) for item in items[start : start + limit]]}
    if start + limit < len(items):
        page["nextPageToken"] = str(start + limit)
    return page


def _entry(model: ServedModel) -> dict[str, object]:
    return {
        "modelName": model.name,
        **({} if model.version is None else {"version": model.version}),
        "modelUrl": model.recipe.url,
        "status": model.status,
    }


def _details(model: ServedModel) -> dict[str, object]:
    recipe = model.recipe
    return {
        "modelName": model.name,
        **({} if model.version is None else {"version": model.version}),
        "modelUrl": recipe.url,
        "batchSize": recipe.batch_size,
        "maxBatchDelayMillis": recipe.max_batch_delay_ms,
        "maxIdleSeconds": recipe.max_idle_s,
        "queueSize": recipe.queue_size,
        "requestInQueue": 0 if model.loaded is None else model.loaded.backend.stats().num_waiting,
        "status": model.status,
        "loadedAtStartup": model.loaded_at_startup,
        "workerGroups": [
            {
                "device": {"deviceType": "cpu", "deviceId": -1},
                "minWorkers": model.min_workers,
                "maxWorkers": model.max_workers,
                "workers": _workers(model),
            }
        ],
    }


def _workers(model: ServedModel) -> list[dict[str, object]]:
    """The model's processes; else the engine is its one worker, while it runs."""
    if model.loaded is None:
        return []
    starts, backend = [model.loaded_at], model.loaded.backend
    if isinstance(backend, Scales):
        starts = list(backend.worker_starts)
    status = "READY" if model.state is ModelState.READY else "UNLOADING"
    return [
        {"id": number, "startTime": _timestamp(start), "status": status}
        for number, start in enumerate(starts, 1)
    ]


def _timestamp(seconds: float) -> str:
    milliseconds = int(seconds * 1000)
    text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(milliseconds // 1000))
    return f"{text}.{milliseconds % 1000:03d}Z"
