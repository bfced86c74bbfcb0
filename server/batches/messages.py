"""Anthropic's ``/v1/messages/batches``: batches whose lines ask for messages, under other names."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from lmi_core.errors import UserError
from lmi_server.batches.lines import MESSAGES, Lines, check
from lmi_server.batches.routes import new_batch, opened
from lmi_server.batches.store import ENDED, BatchStore, Record
from lmi_server.dialects.decode import decode_json
from lmi_server.dialects.large_bodies import worked
from lmi_server.dialects.openai.openai import check_content_type
from lmi_server.dialects.paging import page_limit
from lmi_server.dialects.routes import ServerRoute
from lmi_server.models.model_registry import ModelRegistry

_MOST_LISTED, _USUALLY_LISTED = 1000, 20
_LINES_AT_ONCE = 32


class MessageBatchRequest(msgspec.Struct, frozen=True):
    """``params``: the body of a message."""

    custom_id: str
    params: msgspec.Raw


class MessageBatchBody(msgspec.Struct, frozen=True):
    """A batch to be made."""

    requests: list[MessageBatchRequest]


_BODY = msgspec.json.Decoder(MessageBatchBody)


async def create(request: web.Request, models: ModelRegistry) -> web.Response:
    with models.admission.enter():
        check_content_type(request.headers.get("Content-Type", ""))
        body = await models.admission.read_body(request)
        lines = await worked(_lines_of, body)
        runner, store = await opened(request)
        file = await asyncio.to_thread(store.add_file, "requests.jsonl", "batch", lines)
    _, faults = await asyncio.to_thread(check, store.data_path(file["id"]), MESSAGES)
    if faults:
        await asyncio.to_thread(store.delete_file, file["id"])
        number, message = faults[0]["line"], faults[0]["message"]
        where = "requests" if number is None else f"requests[{number - 1}]"
        raise UserError(f"{where}: {message}", field=where)
    fields = new_batch(file["id"], MESSAGES)
    batch = await asyncio.shield(runner.create(store, fields))
    return web.json_response(_shown(batch))


def _lines_of(body: bytes) -> bytes:
    """The requests of a body as an input file has them."""
    asked = decode_json(_BODY, bytes(body)).requests
    if not asked:
        raise UserError("requests is empty; send at least one", field="requests")
    lines = (
        msgspec.json.encode(
            {"custom_id": one.custom_id, "method": "POST", "url": MESSAGES, "body": one.params}
        )
        for one in asked
    )
    # A line's end can only be between the parts of JSON.
    return b"\n".join(line.replace(b"\r", b" ").replace(b"\n", b" ") for line in lines)


async def list_batches(request: web.Request, models: ModelRegistry) -> web.Response:
    _, store = await opened(request)
    batches = [batch for batch in store.listed("batches") if batch["endpoint"] == MESSAGES]
    query = request.query
    limit = page_limit(query, usual=_USUALLY_LISTED, most=_MOST_LISTED)
    shown, has_more = _between(batches, query.get("after_id"), query.get("before_id"), limit)
    page = {
        "data": [_shown(batch) for batch in shown],
        "has_more": has_more,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
    }
    return web.json_response(page)


def _between(
    batches: list[Record], after: str | None, before: str | None, limit: int
) -> tuple[list[Record], bool]:
    """So many of the newest first, behind one or right before another; whether there are more."""
    ids = [batch["id"] for batch in batches]
    for name, given in (("after_id", after), ("before_id", before)):
        if given is not None and given not in ids:
            raise UserError(f"{name} names {given[:80]!r}, which isn't there", field=name)
    start = 0 if after is None else ids.index(after) + 1
    end = len(ids) if before is None else ids.index(before)
    if before is not None and after is None:
        return batches[max(0, end - limit) : end], end > limit
    return batches[start : min(end, start + limit)], end > start + limit


async def describe(request: web.Request, models: ModelRegistry) -> web.Response:
    _, store = await opened(request)
    return web.json_response(_shown(_batch(request, store)))


async def cancel(request: web.Request, models: ModelRegistry) -> web.Response:
    runner, store = await opened(request)
    batch = _batch(request, store)
    if batch["status"] in ENDED:
        raise UserError("the batch has ended: it can't be cancelled any more", field="batch")
    if batch["status"] != "cancelling":
        await asyncio.shield(runner.cancel(store, batch))
    return web.json_response(_shown(batch))


async def delete(request: web.Request, models: ModelRegistry) -> web.Response:
    _, store = await opened(request)
    batch = _batch(request, store)
    if batch["status"] not in ENDED:
        raise UserError("the batch is in progress; cancel it before it is deleted", field="batch")
    await asyncio.to_thread(store.delete_batch, batch["id"])
    return web.json_response({"id": batch["id"], "type": "message_batch_deleted"})


async def results(request: web.Request, models: ModelRegistry) -> web.StreamResponse:
    _, store = await opened(request)
    batch = _batch(request, store)
    if batch["status"] not in ENDED:
        raise UserError("the batch is in progress: its results come when it has ended")
    response = web.StreamResponse(headers={"Content-Type": "application/x-jsonl"})
    await response.prepare(request)
    lines = _results(store, batch)
    while some := await asyncio.to_thread(lambda: b"".join(islice(lines, _LINES_AT_ONCE))):
        await response.write(some)
    await response.write_eof()
    return response


def _results(store: BatchStore, batch: Record) -> Iterator[bytes]:
    """Lines of what became of each request: for threads."""
    answered: set[str] = set()
    for name in ("output_file_id", "error_file_id"):
        for line in _lines_in(store, batch[name]):
            found = json.loads(line)
            answered.add(found["custom_id"])
            yield _result(found["custom_id"], _outcome(found["response"]))
    path = store.data_path(batch["input_file_id"])
    if not path.is_file():
        return
    with closing(Lines(path)) as lines:
        while some := lines.some():
            for line_ in some:
                if line_.custom_id not in answered:
                    yield _result(line_.custom_id, _unanswered(batch))


def _lines_in(store: BatchStore, file_id: str | None) -> Iterator[bytes]:
    path: Path | None = None if file_id is None else store.data_path(file_id)
    if path is not None and path.is_file():
        with path.open("rb") as file:
            yield from file


def _result(custom_id: str, result: dict[str, Any]) -> bytes:
    return msgspec.json.encode({"custom_id": custom_id, "result": result}) + b"\n"


def _outcome(response: dict[str, Any] | None) -> dict[str, Any]:
    if response is None:
        return {"type": "expired"}
    if response["status_code"] < 300:
        return {"type": "succeeded", "message": response["body"]}
    return {"type": "errored", "error": response["body"]}


def _unanswered(batch: Record) -> dict[str, Any]:
    if batch["status"] in ("cancelled", "expired"):
        return {"type": "canceled" if batch["status"] == "cancelled" else "expired"}
    faults = (batch["errors"] or {}).get("data") or [{"message": "the batch failed"}]
    error = {"type": "api_error", "message": faults[0]["message"]}
    return {"type": "errored", "error": {"type": "error", "error": error}}


def _batch(request: web.Request, store: BatchStore) -> Record:
    return store.batch(request.match_info["batch"], of_messages=True)


def _shown(batch: Record) -> dict[str, Any]:
    has_ended = batch["status"] in ENDED
    ended_at = batch.get(f"{batch['status']}_at") if has_ended else None
    status = "canceling" if batch["status"] == "cancelling" else "in_progress"
    return {
        "id": batch["id"],
        "type": "message_batch",
        "processing_status": "ended" if has_ended else status,
        "request_counts": _counts(batch, has_ended=has_ended),
        "created_at": _time(batch["created_at"]),
        "expires_at": _time(batch["expires_at"]),
        "ended_at": _time(ended_at),
        "cancel_initiated_at": _time(batch["cancelling_at"]),
        "archived_at": None,
        # A path, which clients put behind the address that they have: behind a proxy, what the
        # server takes for its own address may not be one.
        "results_url": f"{_BATCHES}/{batch['id']}/results" if has_ended else None,
    }


def _counts(batch: Record, *, has_ended: bool) -> dict[str, int]:
    """Everything is being processed until the end, as the API has it."""
    counted = batch["request_counts"]
    total, expired = counted["total"], batch.get("num_expired", 0)
    done, failed = (counted["completed"], counted["failed"] - expired) if has_ended else (0, 0)
    left = total - done - failed - (expired if has_ended else 0)
    is_cancelled = batch["status"] == "cancelled"
    return {
        "processing": 0 if has_ended else left,
        "succeeded": done,
        "errored": failed + (left if has_ended and batch["status"] == "failed" else 0),
        "canceled": left if is_cancelled else 0,
        "expired": expired if has_ended else 0,
    }


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"


_BATCHES, _JSON = "/v1/messages/batches", ("application/json",)
_BATCH = f"{_BATCHES}/{{batch}}"
MESSAGE_BATCH_ROUTES = (
    ServerRoute(
        "POST", _BATCHES, create, "begin a batch", bodies=(MessageBatchBody,), answers=_JSON
    ),
    ServerRoute("GET", _BATCHES, list_batches, "list batches", answers=_JSON),
    ServerRoute("GET", _BATCH, describe, "describe a batch", answers=_JSON),
    ServerRoute("DELETE", _BATCH, delete, "delete a batch", answers=_JSON),
    ServerRoute("POST", f"{_BATCH}/cancel", cancel, "cancel a batch", answers=_JSON),
    ServerRoute(
        "GET", f"{_BATCH}/results", results, "a batch's results", answers=("application/x-jsonl",)
    ),
)
