"""A worker: one process at a time, restarted when it fails, that answers batches of jobs."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from lmi_core.custom_code.call import Output, read_output, split_output
from lmi_core.custom_code.errors import FailureKind, HandlerError, LoadError
from lmi_core.custom_code.frame import Frame
from lmi_core.custom_code.job import Job, JobQueue
from lmi_core.custom_code.process import CustomCodeProcess
from lmi_core.errors import EngineError
from lmi_core.settings.custom_code_config import CustomCodeConfig

log = logging.getLogger(__name__)

_call_ids = itertools.count()


class Workplace(Protocol):
    """What a worker needs of its pool."""

    queue: JobQueue
    has_failed: bool

    def note_success(self) -> None: ...

    def note_failure(self, why: str) -> None: ...

    async def back_off(self) -> None:
        """Wait as long as failures in a row ask for."""
        ...


class Worker:
    """Takes jobs from its pool's queue until it is cancelled, idle (if temporary), or given up."""

    def __init__(self, pool: Workplace, config: CustomCodeConfig, *, is_temporary: bool) -> None:
        self._pool = pool
        self._config = config
        self.is_temporary = is_temporary
        self.started_at = 0.0
        """When its process was started, in seconds since the epoch."""
        self._process: CustomCodeProcess | None = None
        self._jobs: list[Job] = []
        self._is_cut_off = False

    @property
    def is_ready(self) -> bool:
        """Whether it has a process that takes or answers a call."""
        return self._process is not None

    @property
    def num_jobs(self) -> int:
        return len(self._jobs)

    async def start(self) -> None:
        """Start the process; LoadError when it can't load the model."""
        self._process = await CustomCodeProcess.start(self._config, self._pool.queue.wake)
        self.started_at = time.time()
        log.info("worker %d of %s is ready", self._process.pid, self._config.model_name)

    async def run(self) -> None:
        """Answer jobs; cancelling the task ends it."""
        try:
            while not self._pool.has_failed:
                if self._process is None:
                    await self._restart()
                elif self._process.has_ended:
                    await self._lose("it ended by itself")
                elif not await self._take():
                    if self.is_temporary and not self._process.has_ended:
                        return
                else:
                    await self._answer()
        finally:
            self._is_cut_off = bool(self._jobs)
            self._fail(HandlerError(FailureKind.SHUTDOWN, "Worker shutting down"))

    async def close(self) -> None:
        """End the process. Idempotent, also where it was interrupted."""
        process = self._process
        if process is not None:
            await (process.kill() if self._is_cut_off else process.close())
            self._process = None

    async def _restart(self) -> None:
        await self._pool.back_off()
        try:
            await self.start()
        except LoadError as error:
            self._pool.note_failure(f"the model could not be loaded: {error}")

    async def _take(self) -> bool:
        """Fill ``_jobs``; False when there is nothing to do."""
        process, config, queue = self._process, self._config, self._pool.queue
        assert process is not None
        idle_s = config.max_idle_time_s if self.is_temporary else None
        was_temporary = self.is_temporary

        def is_over() -> bool:
            changed = self.is_temporary != was_temporary
            return changed or process.has_ended or self._pool.has_failed

        if not await queue.wait(is_over, idle_s):
            return False
        delay_s = config.max_batch_delay_ms / 1000
        await queue.take(self._jobs, config.batch_size, delay_s)
        self._jobs = [job for job in self._jobs if not job.is_cancelled]
        return True

    async def _answer(self) -> None:
        if not self._jobs:
            return
        call_id = next(_call_ids)
        try:
            output = await self._call(call_id)
            if output.streams:
                await self._stream(self._jobs[0], output, call_id)
            else:
                self._deliver(output)
        except HandlerError as error:
            self._fail(error)
            await self._lose(str(error))
        else:
            self._jobs = []
            self._pool.note_success()

    async def _call(self, call_id: int) -> Output:
        requests = [job.request for job in self._jobs]
        fixed = self._config.call_properties
        head = {
            "kind": "call",
            "id": call_id,
            "properties": dict(fixed),
            "requests": [
                {"properties": {**r.properties, **fixed}, "keys": [key for key, _ in r.content]}
                for r in requests
            ],
        }
        blobs = [value for request in requests for _, value in request.content]
        return read_output(await self._exchange(call_id, "output", head, blobs))

    async def _exchange(
        self,
        call_id: int,
        kind: str,
        head: dict[str, Any] | None = None,
        blobs: Sequence[bytes] = (),
    ) -> Frame:
        """Send a frame, if there is one, and wait for the next, which is to be the call's and of
        this kind; HandlerError when it isn't, or time is up."""
        assert self._process is not None
        timeout_s = self._config.predict_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                if head is not None:
                    await self._process.send(head, blobs)
                frame = await self._process.receive()
        except TimeoutError:
            raise HandlerError(
                FailureKind.TIMEOUT,
                f"Python worker did not answer within {timeout_s:g} s (option.predict_timeout)",
            ) from None
        if (frame.head.get("id"), frame.head.get("kind")) != (call_id, kind):
            raise HandlerError(
                FailureKind.CRASHED, "Python worker disconnected. (it answered another call)"
            )
        return frame

    def _deliver(self, output: Output) -> None:
        try:
            answers = split_output(output, len(self._jobs))
        except HandlerError as error:
            self._fail(error)
            return
        for job, answer in zip(self._jobs, answers, strict=True):
            job.finish(answer)

    async def _stream(self, job: Job, output: Output, call_id: int) -> None:
        process = self._process
        assert process is not None
        job.on_cancel = lambda: process.post({"kind": "cancel", "id": call_id})
        if job.is_cancelled:
            job.on_cancel()
        job.finish(replace(output.answer, chunks=job.chunks()))
        try:
            while True:
                frame = await self._exchange(call_id, "chunk")
                for blob in frame.blobs:
                    await job.put(blob)
                if frame.head.get("last", True):
                    break
        finally:
            job.on_cancel = None
        error_text = frame.head.get("error")
        await job.put(None if error_text is None else EngineError(str(error_text)))

    async def _lose(self, why: str) -> None:
        """The process is of no use any more."""
        process = self._process
        if process is not None:
            log.error("worker %d of %s: %s", process.pid, self._config.model_name, why)
            await process.kill()
            self._process = None
            self._pool.note_failure(why)

    def _fail(self, error: HandlerError) -> None:
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.fail(error)
