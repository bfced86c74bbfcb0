"""Requests on their way to a worker, and the queue in which they wait."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable

from lmi_core.custom_code.call import HandlerAnswer, HandlerRequest

_MAX_CHUNKS = 8


class Job:
    """A request, the answer to come, and its stream's pieces that were not read yet."""

    def __init__(self, request: HandlerRequest) -> None:
        self.request = request
        self.answer: asyncio.Future[HandlerAnswer] = asyncio.get_running_loop().create_future()
        self.is_cancelled = False
        self.on_cancel: Callable[[], None] | None = None
        """Set while a worker streams the answer."""
        self._chunks: asyncio.Queue[bytes | Exception | None] = asyncio.Queue(_MAX_CHUNKS)

    def finish(self, answer: HandlerAnswer) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)

    def fail(self, error: Exception) -> None:
        """Answer with an error, or end the stream with it. Never waits."""
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()  # Whoever asked may have left.
        elif not self.is_cancelled:
            while self._chunks.full():
                self._chunks.get_nowait()
            self._chunks.put_nowait(error)

    async def put(self, chunk: bytes | Exception | None) -> None:
        """Add a piece of the stream, an error that ends it, or None, its end.

        Waits while a slow reader has pieces left.
        """
        if not self.is_cancelled:
            await self._chunks.put(chunk)

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The stream's pieces."""
        while (chunk := await self._chunks.get()) is not None:
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk

    def cancel(self) -> None:
        """Nobody waits for the answer any more. Idempotent."""
        if self.is_cancelled:
            return
        self.is_cancelled = True
        self.answer.cancel()
        while not self._chunks.empty():
            self._chunks.get_nowait()
        if self.on_cancel is not None:
            self.on_cancel()


class JobQueue:
    """Jobs in order of arrival."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self._woken = asyncio.Event()

    def __len__(self) -> int:
        return len(self._jobs)

    def put(self, job: Job) -> None:
        self._jobs.append(job)
        self.wake()

    def discard(self, job: Job) -> None:
        """Forget a job that may be waiting."""
        if job in self._jobs:
            self._jobs.remove(job)

    def wake(self) -> None:
        """Let those who wait look again."""
        self._woken.set()

    def take_all(self) -> list[Job]:
        jobs = list(self._jobs)
        self._jobs.clear()
        return jobs

    async def wait(self, is_over: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait for a job; False when ``is_over()`` turned true (see ``wake``) or time is up."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._jobs:
                    if is_over():
                        return False
                    self._woken.clear()
                    await self._woken.wait()
        except TimeoutError:
            return False
        return not is_over()

    async def take(self, jobs: list[Job], num_jobs: int, delay_s: float) -> None:
        """Move up to ``num_jobs`` into ``jobs``, waiting ``delay_s`` at most for the last ones."""
        deadline = asyncio.get_running_loop().time() + delay_s
        while len(jobs) < num_jobs:
            if self._jobs:
                jobs.append(self._jobs.popleft())
                continue
            remaining = deadline - asyncio.get_running_loop().time()
            if remaining <= 0 or not await self.wait(lambda: False, remaining):
                return
