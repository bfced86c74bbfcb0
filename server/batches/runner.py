"""Works on batches in the background: some lines at a time, and only when nobody else waits."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from aiohttp import web

from lmi_core.engine.request import GenerationRequest
from lmi_core.errors import EngineError, UserError, first_of
from lmi_core.settings.batch_config import BatchConfig
from lmi_server.batches.answer import Answered, answered
from lmi_server.batches.endpoints import ENDPOINTS
from lmi_server.batches.lines import Line, Lines, answer_line, check, failure_line
from lmi_server.batches.store import Answers, BatchStore, Record, tenants_in
from lmi_server.models.model_registry import ModelRegistry

log = logging.getLogger(__name__)

Own = Callable[[str, GenerationRequest], GenerationRequest]
"""A request as that of a tenant, by its name."""


class BatchRunner:
    """All tenants' stores, and a task for each batch that isn't at its end."""

    def __init__(self, models: ModelRegistry, options: BatchConfig, own: Own) -> None:
        self._models = models
        self._options = options
        self._own = own
        self._stores: dict[str, BatchStore] = {}
        self._opening = asyncio.Lock()
        self._places = asyncio.Semaphore(options.concurrency)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._resuming: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Go on with what a former process has left."""
        self._resuming = asyncio.get_running_loop().create_task(self._resume())

    async def stop(self) -> None:
        """Leave every batch as it is. Idempotent."""
        tasks = [*self._tasks.values(), *filter(None, [self._resuming])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def store(self, tenant: str) -> BatchStore:
        """EngineError where the directory can't be used."""
        async with self._opening:
            if tenant not in self._stores:
                directory, most = self._options.directory, self._options.max_bytes
                try:
                    opened = await asyncio.to_thread(BatchStore, directory, tenant, most)
                except OSError as error:
                    message = f"batch_dir {directory} can't be used: {error.strerror}"
                    raise EngineError(message) from None
                self._stores[tenant] = opened
            return self._stores[tenant]

    async def create(self, store: BatchStore, fields: Mapping[str, Any]) -> Record:
        """A new batch, which is worked on from now on."""
        batch = await asyncio.to_thread(store.add_batch, fields)
        self.run(store, batch)
        return batch

    def run(self, store: BatchStore, batch: Record) -> None:
        """Work on a batch, from where it is."""
        task = asyncio.get_running_loop().create_task(self._run(store, batch))
        self._tasks[batch["id"]] = task
        task.add_done_callback(lambda _: self._tasks.pop(batch["id"], None))

    async def cancel(self, store: BatchStore, batch: Record) -> None:
        """Stop its lines; what is answered is kept."""
        batch.update(status="cancelling", cancelling_at=int(time.time()))
        await asyncio.to_thread(store.save_batch, batch)
        if (task := self._tasks.get(batch["id"])) is not None:
            task.cancel()
            await asyncio.wait([task])
        self.run(store, batch)

    async def _resume(self) -> None:
        for tenant in await asyncio.to_thread(lambda: list(tenants_in(self._options.directory))):
            with suppress(EngineError):  # each call says so, too
                store = await self.store(tenant)
                for batch in store.unfinished():
                    self.run(store, batch)

    async def _run(self, store: BatchStore, batch: Record) -> None:
        try:
            if batch["status"] == "validating":
                await self._validate(store, batch)
            if batch["status"] == "in_progress":
                await self._work(store, batch)
            if batch["status"] in ("finalizing", "cancelling"):
                await self._finalize(store, batch)
        except (OSError, UserError) as error:  # no room for the answers, or its input is gone
            log.error("batch %s failed: %s", batch["id"], error)
            fault = {"code": "storage", "line": None, "message": str(error), "param": None}
            batch.update(errors={"object": "list", "data": [fault]}, ends_as="failed")
            with suppress(OSError):
                await self._finalize(store, batch)
        except Exception:
            log.exception("batch %s failed", batch["id"])

    async def _validate(self, store: BatchStore, batch: Record) -> None:
        path = store.data_path(batch["input_file_id"])
        num_lines, errors = await asyncio.to_thread(check, path, batch["endpoint"])
        batch["request_counts"]["total"] = num_lines
        now = int(time.time())
        if errors:
            batch.update(status="failed", failed_at=now, errors={"object": "list", "data": errors})
        else:
            batch.update(status="in_progress", in_progress_at=now)
        await asyncio.to_thread(store.save_batch, batch)

    async def _work(self, store: BatchStore, batch: Record) -> None:
        made = asyncio.create_task(asyncio.to_thread(_Progress, store, batch))
        progress: _Progress | None = None
        try:
            progress = await asyncio.shield(made)
            async with asyncio.TaskGroup() as group:
                while lines := await asyncio.to_thread(progress.lines.some):
                    for line in lines:
                        if not progress.has(line.custom_id):
                            await self._places.acquire()
                            task = group.create_task(self._answer(progress, line))
                            task.add_done_callback(lambda _: self._places.release())
        except BaseExceptionGroup as errors:
            raise first_of(errors) from None
        finally:
            # A task that is stopped before the thread has opened the files waits to close them.
            await asyncio.to_thread((progress or await made).close)
        batch.update(status="finalizing", finalizing_at=int(time.time()))
        await asyncio.to_thread(store.save_batch, batch)

    async def _answer(self, progress: _Progress, line: Line) -> None:
        """One line's answer, written once; UserError or OSError where it can't be."""
        batch = progress.batch
        left_s = batch["expires_at"] - time.time()
        request_id = f"{batch['id']}-{progress.number()}"
        answer: Answered | None = None
        if left_s > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    own = partial(self._own, progress.tenant)
                    endpoint = ENDPOINTS[batch["endpoint"]]
                    asked = endpoint, progress.tenant, request_id, line.body
                    answer = await answered(self._models, *asked, own)
        if answer is None:
            batch["ends_as"] = "expired"
            message = "This request could not be executed before the completion window expired."
            written = failure_line(line.custom_id, "batch_expired", message)
        else:
            written = answer_line(line.custom_id, answer.status, request_id, answer.body)
        is_good = answer is not None and answer.status < 300
        await asyncio.to_thread(progress.append, line.custom_id, written, is_good=is_good)

    async def _finalize(self, store: BatchStore, batch: Record) -> None:
        for kind in ("output", "errors"):
            file_id = batch[f"{kind}_id"]
            if await asyncio.to_thread(store.keep_answers, batch["id"], kind, file_id):
                batch["output_file_id" if kind == "output" else "error_file_id"] = file_id
        ends_as = batch.get("ends_as") or "completed"
        if batch["status"] == "cancelling":
            ends_as = "cancelled"
        batch.update({"status": ends_as, f"{ends_as}_at": int(time.time())})
        await asyncio.to_thread(store.save_batch, batch)


class _Progress:
    """What is answered of a batch; made and closed in threads."""

    def __init__(self, store: BatchStore, batch: Record) -> None:
        self.batch = batch
        self.tenant = store.tenant
        self.lines = Lines(store.data_path(batch["input_file_id"]))
        self._answers = {kind: Answers(store, batch["id"], kind) for kind in ("output", "errors")}
        self._num_begun = 0
        self._lock = threading.Lock()
        self._is_closed = False
        self._count()

    def has(self, custom_id: str) -> bool:
        return any(custom_id in answers.custom_ids for answers in self._answers.values())

    def number(self) -> int:
        self._num_begun += 1
        return self._num_begun

    def append(self, custom_id: str, line: bytes, *, is_good: bool) -> None:
        """Not of a batch that was stopped meanwhile: the thread goes on when its task has ended."""
        with self._lock:
            if not self._is_closed:
                self._answers["output" if is_good else "errors"].append(custom_id, line)
                self._count()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self.lines.close()
            for answers in self._answers.values():
                answers.close()

    def _count(self) -> None:
        counts = self.batch["request_counts"]
        counts["completed"] = len(self._answers["output"].custom_ids)
        counts["failed"] = len(self._answers["errors"].custom_ids)
        self.batch["num_expired"] = self._answers["errors"].num_unsent


BATCHES: web.AppKey[BatchRunner] = web.AppKey("batches", BatchRunner)
"""Of an application that has the Batch API."""
