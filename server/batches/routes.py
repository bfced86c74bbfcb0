"""``/v1/files`` and ``/v1/batches``, as OpenAI's clients speak them."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Mapping

import msgspec
from aiohttp import web

from lmi_core.errors import UserError
from lmi_server.batches.endpoints import OPENAI_ENDPOINTS
from lmi_server.batches.runner import BATCHES, BatchRunner
from lmi_server.batches.store import ENDED, BatchStore, Record
from lmi_server.dialects.base import HttpError
from lmi_server.dialects.decode import decode_json
from lmi_server.dialects.paging import page_of
from lmi_server.dialects.routes import ServerRoute
from lmi_server.http.form import form_items
from lmi_server.http.tenants import tenant_name
from lmi_server.models.model_registry import ModelRegistry

_FILE_NAME = re.compile(rb'filename="([^"\r\n]{1,255})"')
_HEAD_BYTES = 65_536
_MAX_BODY_BYTES = 65_536
_WINDOW, _WINDOW_S = "24h", 24 * 3600
_MOST_LISTED, _USUALLY_LISTED = 10_000, 20
_PRIVATE = ("output_id", "errors_id", "ends_as", "num_expired")


class BatchBody(msgspec.Struct, frozen=True, kw_only=True):
    """A batch to be made."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None


_BODY = msgspec.json.Decoder(BatchBody)


async def opened(request: web.Request) -> tuple[BatchRunner, BatchStore]:
    """HttpError where the API is off."""
    runner = request.app.get(BATCHES)
    if runner is None:
        raise HttpError(
            404, "NotFound", "The Batch API is off; give the server a directory for it (batch_dir)"
        )
    return runner, await runner.store(tenant_name(request))


async def upload(request: web.Request, models: ModelRegistry) -> web.Response:
    _, store = await opened(request)
    with models.admission.enter():
        body = await models.admission.read_body(request)
        items = await form_items(request.headers.get("Content-Type", ""), body)
        if items is None:
            raise HttpError(
                415, "UnsupportedMediaTypeException", "a file comes as multipart/form-data"
            )
        fields = dict(items)
        purpose = fields.get("purpose", b"").decode("utf-8", "replace")
        if purpose != "batch":
            raise UserError(f"purpose must be batch, got {purpose[:40]!r}", field="purpose")
        if not fields.get("file"):
            raise UserError("file is missing, or empty", field="file")
        named = _FILE_NAME.search(body, 0, _HEAD_BYTES)
        name = named[1].decode("utf-8", "replace") if named else "upload.jsonl"
        file = await asyncio.to_thread(store.add_file, name, purpose, fields["file"])
    return web.json_response(file)


async def list_files(request: web.Request, models: ModelRegistry) -> web.Response:
    _, store = await opened(request)
    purpose = request.query.get("purpose")
    files = [file for file in store.listed("files") if purpose in (None, file["purpose"])]
    if request.query.get("order") == "asc":
        files.reverse()
    return _page(page_of(files, request.query, usual=_MOST_LISTED, most=_MOST_LISTED))


async def describe_file(request: web.Request, models: ModelRegistry) -> web.Response:
    _, store = await opened(request)
    return web.json_response(store.get("files", request.match_info["file"]))


async def content(request: web.Request, models: ModelRegistry) -> web.StreamResponse:
    _, store = await opened(request)
    file = store.get("files", request.match_info["file"])
    headers = {"Content-Type": "application/octet-stream"}
    return web.FileResponse(store.data_path(file["id"]), headers=headers)


async def delete_file(request: web.Request, models: ModelRegistry) -> web.Response:
    _, store = await opened(request)
    name = request.match_info["file"]
    await asyncio.to_thread(store.delete_file, name)
    return web.json_response({"id": name, "object": "file", "deleted": True})


async def create(request: web.Request, models: ModelRegistry) -> web.Response:
    with models.admission.enter():
        data = await models.admission.read_body(request)
    if len(data) > _MAX_BODY_BYTES:
        raise UserError(
            f"the body has {len(data)} bytes; a batch is asked for in {_MAX_BODY_BYTES} at most, "
            "its requests are in a file",
            field="body",
        )
    asked = decode_json(_BODY, data)
    runner, store = await opened(request)
    if asked.endpoint not in OPENAI_ENDPOINTS:
        raise UserError(
            f"endpoint must be {' or '.join(OPENAI_ENDPOINTS)}, got {asked.endpoint[:60]!r}",
            field="endpoint",
        )
    if asked.completion_window != _WINDOW:
        raise UserError(
            f"completion_window must be {_WINDOW}, got {asked.completion_window[:40]!r}",
            field="completion_window",
        )
    if store.get("files", asked.input_file_id)["purpose"] != "batch":
        raise UserError("input_file_id names a file of answers", field="input_file_id")
    # A client that leaves now leaves a batch that is worked on.
    fields = new_batch(asked.input_file_id, asked.endpoint, asked.metadata)
    batch = await asyncio.shield(runner.create(store, fields))
    return web.json_response(_shown(batch))


async def list_batches(request: web.Request, models: ModelRegistry) -> web.Response:
    _, store = await opened(request)
    listed = store.listed("batches")
    batches = [batch for batch in listed if batch["endpoint"] in OPENAI_ENDPOINTS]
    page = page_of(batches, request.query, usual=_USUALLY_LISTED, most=_MOST_LISTED)
    return _page({**page, "data": [_shown(batch) for batch in page["data"]]})


async def describe(request: web.Request, models: ModelRegistry) -> web.Response:
    _, store = await opened(request)
    return web.json_response(_shown(store.batch(request.match_info["batch"])))


async def cancel(request: web.Request, models: ModelRegistry) -> web.Response:
    runner, store = await opened(request)
    batch = store.batch(request.match_info["batch"])
    if batch["status"] in ENDED:
        raise HttpError(
            409, "Conflict", f"the batch is {batch['status']}: it can't be cancelled any more"
        )
    if batch["status"] != "cancelling":
        await asyncio.shield(runner.cancel(store, batch))
    return web.json_response(_shown(batch))


def new_batch(
    input_file_id: str, endpoint: str, metadata: Mapping[str, str] | None = None
) -> Record:
    """What is known of a batch before anything was done."""
    times = (
        *("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at"),
        *("cancelling_at", "cancelled_at"),
    )
    return {
        "endpoint": endpoint,
        "errors": None,
        "input_file_id": input_file_id,
        "completion_window": _WINDOW,
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        **dict.fromkeys(times),
        "expires_at": int(time.time()) + _WINDOW_S,
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": metadata,
        "output_id": f"file-{uuid.uuid4().hex}",
        "errors_id": f"file-{uuid.uuid4().hex}",
    }


def _page(page: Record) -> web.Response:
    """Written in a fraction of the time that Python's own library takes for 10,000 records."""
    return web.json_response(text=msgspec.json.encode(page).decode())


def _shown(batch: Record) -> Record:
    """Without what is only for going on with it."""
    return {name: value for name, value in batch.items() if name not in _PRIVATE}


_JSON = ("application/json",)
_FILE, _BATCH = "/v1/files/{file}", "/v1/batches/{batch}"
BATCH_ROUTES = (
    ServerRoute("POST", "/v1/files", upload, "upload a file", answers=_JSON),
    ServerRoute("GET", "/v1/files", list_files, "list files", answers=_JSON),
    ServerRoute("GET", _FILE, describe_file, "describe a file", answers=_JSON),
    ServerRoute("DELETE", _FILE, delete_file, "delete a file", answers=_JSON),
    ServerRoute(
        "GET",
        f"{_FILE}/content",
        content,
        "a file's content",
        answers=("application/octet-stream",),
    ),
    ServerRoute("POST", "/v1/batches", create, "begin a batch", bodies=(BatchBody,), answers=_JSON),
    ServerRoute("GET", "/v1/batches", list_batches, "list batches", answers=_JSON),
    ServerRoute("GET", _BATCH, describe, "describe a batch", answers=_JSON),
    ServerRoute("POST", f"{_BATCH}/cancel", cancel, "cancel a batch", answers=_JSON),
)
