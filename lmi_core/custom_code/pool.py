"""The workers of one handler: what a server calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from lmi_core.custom_code.call import HandlerAnswer, HandlerRequest
from lmi_core.custom_code.errors import FailureKind, HandlerError, LoadError
from lmi_core.custom_code.job import Job, JobQueue
from lmi_core.custom_code.worker import Worker
from lmi_core.errors import CapacityError, InsufficientMemoryError, ModelError
from lmi_core.sandbox.restart import pause_s
from lmi_core.settings.custom_code_config import CustomCodeConfig

_OUT_OF_MEMORY = 507

log = logging.getLogger(__name__)


class CustomCodePool:
    """Between ``start`` and ``stop``: takes requests and hands them to workers in batches.

    A process that ends or doesn't answer in time is replaced at once, and after further failures
    in a row with growing pauses, in which requests are refused; after ``retry_threshold`` failures
    in all, the pool has failed.
    """

    def __init__(self, config: CustomCodeConfig) -> None:
        self.config = config
        self.queue = JobQueue()
        self._min_workers, self._max_workers = config.min_workers, config.max_workers
        self.has_failed = False
        self.num_failures = 0
        self.num_requests = 0
        """Requests taken."""
        self._num_in_a_row = 0
        self._is_pausing = False
        self._workers: dict[Worker, asyncio.Task[None] | None] = {}

    @property
    def workers(self) -> list[Worker]:
        """Those that take requests or are about to."""
        return list(self._workers)

    @property
    def num_ready_workers(self) -> int:
        return sum(worker.is_ready for worker in self._workers)

    @property
    def lacks_workers(self) -> bool:
        """Whether some that should always run are being restarted."""
        return self.num_ready_workers < self._min_workers

    @property
    def num_running(self) -> int:
        """Requests that processes work on."""
        return sum(worker.num_jobs for worker in self._workers)

    async def start(self) -> None:
        """Start ``min_workers`` processes; ModelError when one can't load the model."""
        workers = [self._add(is_temporary=False) for _ in range(self.config.min_workers)]
        try:
            await self._load(workers)
        except BaseException as error:
            await self.stop()
            if isinstance(error, LoadError):
                is_memory = error.code == _OUT_OF_MEMORY
                kind = InsufficientMemoryError if is_memory else ModelError
                raise kind(f"Failed to initialize model: {error}") from None
            raise
        for worker in workers:
            self._workers[worker] = asyncio.create_task(self._run(worker))

    async def stop(self) -> None:
        """End every process; requests that are inside fail. Idempotent."""
        workers, self._workers = self._workers, {}
        tasks = [task for task in workers.values() if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fail_waiting(HandlerError(FailureKind.SHUTDOWN, "Worker shutting down"))
        await asyncio.gather(*(worker.close() for worker in workers))

    def scale(self, min_workers: int, max_workers: int) -> None:
        """Keep other numbers of workers from now on; those too many end once they are idle."""
        self._min_workers, self._max_workers = min_workers, max_workers
        permanent = [worker for worker in self._workers if not worker.is_temporary]
        for worker in permanent[min_workers:]:
            worker.is_temporary = True
        for _ in range(min_workers - len(permanent)):
            self._launch(is_temporary=False)
        self.queue.wake()

    @asynccontextmanager
    async def call(self, request: HandlerRequest) -> AsyncGenerator[HandlerAnswer, None]:
        """A request's answer; leaving gives up what is still to come of it.

        Raises CapacityError when the queue is full, HandlerError when no process could answer.
        """
        self._check_capacity()
        job = Job(request)
        self.num_requests += 1
        self.queue.put(job)
        self._grow()
        try:
            yield await job.answer
        finally:
            self.queue.discard(job)
            job.cancel()

    def note_success(self) -> None:
        """A process has answered."""
        self._num_in_a_row = 0

    def note_failure(self, why: str) -> None:
        """A process has failed, or could not be started."""
        self.num_failures += 1
        self._num_in_a_row += 1
        if self.num_failures > self.config.retry_threshold:
            self.has_failed = True
            log.error(
                "%s: %d failures are more than retry_threshold=%d; no process is started any more",
                self.config.model_name,
                self.num_failures,
                self.config.retry_threshold,
            )
            self._fail_waiting(self._out_of_capacity())
            self.queue.wake()
        else:
            log.warning("%s: restarting a worker (%s)", self.config.model_name, why)

    async def back_off(self) -> None:
        """Wait before the next start; meanwhile requests are refused if no other process runs."""
        seconds = pause_s(self._num_in_a_row)
        if not seconds:
            return
        self._is_pausing = True
        if not self.num_ready_workers:
            self._fail_waiting(_stopped())
        try:
            await asyncio.sleep(seconds)
        finally:
            self._is_pausing = False

    async def _load(self, workers: list[Worker]) -> None:
        if not self.config.parallel_loading:
            for worker in workers:
                await worker.start()
            return
        starts = (worker.start() for worker in workers)
        for failure in await asyncio.gather(*starts, return_exceptions=True):
            if failure is not None:
                raise failure

    def _check_capacity(self) -> None:
        if self.has_failed:
            raise self._out_of_capacity()
        if self._is_pausing and not self.num_ready_workers:
            raise _stopped()
        if len(self.queue) >= self.config.max_queue_size:
            raise CapacityError(
                f"{len(self.queue)} requests wait, which is the limit (job_queue_size)",
                retry_after_s=1.0,
            )

    def _out_of_capacity(self) -> CapacityError:
        return CapacityError(f"all workers are dead after {self.num_failures} failures")

    def _grow(self) -> None:
        """Add a worker where there is none, or for as long as many requests wait."""
        is_needed = not self._workers or len(self.queue) > 2 * self.config.batch_size
        if is_needed and len(self._workers) < self._max_workers and not self.has_failed:
            self._launch(is_temporary=True)

    def _launch(self, *, is_temporary: bool) -> None:
        worker = self._add(is_temporary=is_temporary)
        self._workers[worker] = asyncio.create_task(self._run(worker))

    def _add(self, *, is_temporary: bool) -> Worker:
        worker = Worker(self, self.config, is_temporary=is_temporary)
        self._workers[worker] = None
        return worker

    async def _run(self, worker: Worker) -> None:
        try:
            await worker.run()
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("a worker of %s failed", self.config.model_name)
        await worker.close()
        self._workers.pop(worker, None)

    def _fail_waiting(self, error: Exception) -> None:
        for job in self.queue.take_all():
            job.fail(error)


def _stopped() -> HandlerError:
    return HandlerError(FailureKind.STOPPED, "Backend Python process is stopped.")
