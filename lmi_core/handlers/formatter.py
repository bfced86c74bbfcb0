"""A model's own output formatter: one process that all requests of an engine share."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from lmi_core.config.handler_config import HandlerConfig
from lmi_core.engine.outputs import TokenEvent
from lmi_core.errors import EngineError, ModelError
from lmi_core.handlers.errors import FailureKind, HandlerError, LoadError
from lmi_core.handlers.process import HandlerProcess
from lmi_core.handlers.restart import pause_s

log = logging.getLogger(__name__)


Formatted = tuple[bytes, str | None]
"""What the function wrote, and the error that it raised then."""


class OutputFormatter:
    """Between ``start`` and ``stop``: turns tokens into text by the model's own function.

    A process that ends or doesn't answer in time fails the streams that it had, and is replaced.
    """

    def __init__(self, config: HandlerConfig) -> None:
        self._config = config
        self._process: HandlerProcess | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._answers: dict[int, asyncio.Future[Formatted]] = {}
        self._numbers = itertools.count(1)
        self.num_failures = 0

    @property
    def has_failed(self) -> bool:
        """Whether no process will be started any more."""
        return self.num_failures > self._config.retry_threshold

    async def start(self) -> None:
        """Load the file; ModelError when that fails."""
        try:
            self._process = await HandlerProcess.start(self._config, lambda: None)
        except LoadError as error:
            raise ModelError(f"Failed to load the output formatter: {error}") from None
        self._keeper = asyncio.create_task(self._keep_running())

    async def stop(self) -> None:
        """End the process; what is being formatted fails. Idempotent."""
        if self._keeper is not None:
            self._keeper.cancel()
            with suppress(asyncio.CancelledError):
                await self._keeper
        self._fail(HandlerError(FailureKind.SHUTDOWN, "Worker shutting down"))
        if self._process is not None:
            process, self._process = self._process, None
            await process.close()

    def open(self, prompt: str, parameters: Mapping[str, object]) -> FormatterStream:
        """A stream of one request's tokens; HandlerError while no process runs."""
        if self._process is None:
            raise HandlerError(FailureKind.STOPPED, "Backend Python process is stopped.")
        given: dict[str, object] = {"text": prompt, "parameters": dict(parameters)}
        return FormatterStream(self, self._process, next(self._numbers), given)

    async def exchange(self, process: HandlerProcess, head: dict[str, Any]) -> Formatted:
        """Send a frame and wait for its text."""
        if process is not self._process:
            raise HandlerError(FailureKind.CRASHED, "Python worker disconnected.")
        number = next(self._numbers)
        answer: asyncio.Future[Formatted] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        timeout_s = self._config.predict_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await process.send({**head, "kind": "format", "id": number})
                return await answer
        except TimeoutError:
            await process.kill()
            raise HandlerError(
                FailureKind.TIMEOUT,
                f"the output formatter did not answer within {timeout_s:g} s "
                "(option.predict_timeout)",
            ) from None
        finally:
            del self._answers[number]

    async def _keep_running(self) -> None:
        num_in_a_row = 0
        while not self.has_failed:
            try:
                if self._process is None:
                    await asyncio.sleep(pause_s(num_in_a_row))
                    self._process = await HandlerProcess.start(self._config, lambda: None)
                await self._read(self._process)
            except (HandlerError, LoadError) as error:
                process, self._process = self._process, None
                self.num_failures += 1
                num_in_a_row = 1 if process is not None else num_in_a_row + 1
                log.error("the output formatter of %s: %s", self._config.model_name, error)
                if process is not None:
                    await process.kill()
                self._fail(HandlerError(FailureKind.CRASHED, str(error)))
        log.error("the output formatter of %s is given up", self._config.model_name)

    async def _read(self, process: HandlerProcess) -> None:
        while True:
            frame = await process.receive()
            answer = self._answers.get(frame.head.get("id", 0))
            if answer is None or answer.done():
                continue
            error = frame.head.get("error")
            answer.set_result((b"".join(frame.blobs), None if error is None else str(error)))

    def _fail(self, error: HandlerError) -> None:
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)


class FormatterStream:
    """One request's tokens in the order of their generation."""

    def __init__(
        self,
        formatter: OutputFormatter,
        process: HandlerProcess,
        number: int,
        given: dict[str, object],
    ) -> None:
        self._formatter = formatter
        self._process = process
        self._number = number
        self._given: dict[str, object] | None = given
        self._is_finished = False
        self.failure: EngineError | None = None
        """Set once the function has raised: the stream ends with what it wrote before."""

    async def format(self, events: Sequence[TokenEvent]) -> bytes:
        """The text that the function makes of ``events``; HandlerError when there is none."""
        head: dict[str, Any] = {
            "stream": self._number,
            "input": self._given,
            "tokens": [_token(event) for event in events if event.prompt is None],
        }
        self._given = None
        self._is_finished = any(event.finish_reason is not None for event in events)
        text, error = await self._formatter.exchange(self._process, head)
        if error is not None:
            self._is_finished = True
            self.failure = EngineError(error)
        return text

    def close(self) -> None:
        """Forget a stream that has not ended. Idempotent."""
        if not self._is_finished:
            self._is_finished = True
            self._process.post({"kind": "forget", "stream": self._number})


def _token(event: TokenEvent) -> dict[str, Any]:
    return {
        "id": event.token_id,
        "text": event.text,
        "log_prob": event.logprob,
        "special": event.special,
        "finish_reason": None if event.finish_reason is None else str(event.finish_reason),
        "top": [{"id": t.token_id, "text": t.text, "log_prob": t.logprob} for t in event.top],
    }
