"""What the management routes say about models (LMI format reference, 3.8)."""

from __future__ import annotations

import time
from collections.abc import Sequence

from lmi_server.handler_backend import HandlerBackend
from lmi_server.model import ModelState, ServedModel

MAX_PAGE = 100


def listing(models: Sequence[ServedModel], limit: int, start: int) -> dict[str, object]:
    """A page of at most ``limit`` models, those from index ``start`` on."""
    limit = limit if 0 <= limit <= MAX_PAGE else MAX_PAGE
    page: dict[str, object] = {"models": [_entry(m) for m in models[start : start + limit]]}
    if start + limit < len(models):
        page["nextPageToken"] = str(start + limit)
    return page


def description(model: ServedModel) -> dict[str, object]:
    """A model as a workflow of its own, which is how DJL-Serving sees it."""
    return {
        "workflowName": model.name,
        **({} if model.version is None else {"version": model.version}),
        "models": [_details(model)],
    }


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
        "requestInQueue": 0 if model.endpoint is None else model.backend.stats().num_waiting,
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
    """A handler's processes; else the engine is the model's one worker, while it runs."""
    if model.endpoint is None:
        return []
    starts = [model.loaded_at]
    if isinstance(model.backend, HandlerBackend):
        starts = [worker.started_at for worker in model.backend.pool.workers if worker.is_ready]
    status = "READY" if model.state is ModelState.READY else "UNLOADING"
    return [
        {"id": number, "startTime": _timestamp(start), "status": status}
        for number, start in enumerate(starts, 1)
    ]


def _timestamp(seconds: float) -> str:
    milliseconds = int(seconds * 1000)
    text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(milliseconds // 1000))
    return f"{text}.{milliseconds % 1000:03d}Z"
