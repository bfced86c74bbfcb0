"""A model's own formatters: one process that all requests of an engine share."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from lmi_core.custom_code.call import HandlerRequest
from lmi_core.custom_code.errors import FailureKind, HandlerError, LoadError
from lmi_core.custom_code.process import CustomCodeProcess
from lmi_core.engine.outputs import TokenEvent
from lmi_core.errors import EngineError, ModelError, UserError
from lmi_core.sandbox.restart import pause_s
from lmi_core.settings.custom_code_config import CustomCodeConfig

log = logging.getLogger(__name__)


Formatted = tuple[bytes, str | None]
"""What a function wrote, and the error that it raised then."""


class Formatters:
    """Between ``start`` and ``stop``: turns requests into bodies and tokens into text by the
    model's own functions.

    A process that ends or doesn't answer in time fails the streams that it had, and is replaced.
    """

    def __init__(self, config: CustomCodeConfig) -> None:
        self._config = config
        self._process: CustomCodeProcess | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._answers: dict[int, asyncio.Future[Formatted]] = {}
        self._numbers = itertools.count(1)
        self.num_failures = 0

    @property
    def reads_inputs(self) -> bool:
        """Whether there is a function for requests."""
        return self._config.input_formatter is not None

    @property
    def has_failed(self) -> bool:
        """Whether no process will be started any more."""
        return self.num_failures > self._config.retry_threshold

    async def start(self) -> None:
        """Load the file; ModelError when that fails."""
        try:
            self._process = await CustomCodeProcess.start(self._config, lambda: None)
        except LoadError as error:
            raise ModelError(f"Failed to load the formatters: {error}") from None
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

    @asynccontextmanager
    async def read(self, request: HandlerRequest) -> AsyncIterator[tuple[bytes, int]]:
        """The body that the function makes of a request, and the number by which ``open`` finds
        what it returned, until the end of the block.

        UserError when the function raises, HandlerError when it can't answer.
        """
        process = self._running()
        head = {
            "kind": "read",
            "properties": dict(request.properties),
            "keys": [key for key, _ in request.content],
        }
        number = next(self._numbers)
        try:
            blobs = [value for _, value in request.content]
            body, error = await self.exchange(process, head, blobs, number=number)
            if error is not None:
                raise UserError(f"Custom formatter failed: {error}", field="body")
            yield body, number
        finally:
            process.post({"kind": "forget_input", "id": number})

    def open(
        self, prompt: str, parameters: Mapping[str, object], input_number: int | None = None
    ) -> FormatterStream:
        """A stream of one request's tokens; HandlerError while no process runs."""
        given: dict[str, object] = {"text": prompt, "parameters": dict(parameters)}
        given["input"] = input_number
        return FormatterStream(self, self._running(), next(self._numbers), given)

    async def exchange(
        self,
        process: CustomCodeProcess,
        head: dict[str, Any],
        blobs: Sequence[bytes] = (),
        *,
        number: int | None = None,
    ) -> Formatted:
        """Send a frame and wait for what is written in answer."""
        if process is not self._process:
            raise HandlerError(FailureKind.CRASHED, "Python worker disconnected.")
        number = next(self._numbers) if number is None else number
        answer: asyncio.Future[Formatted] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        timeout_s = self._config.predict_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await process.send({**head, "id": number}, blobs)
                return await answer
        except TimeoutError:
            await process.kill()
            raise HandlerError(
                FailureKind.TIMEOUT,
                f"the model's formatter did not answer within {timeout_s:g} s "
                "(option.predict_timeout)",
            ) from None
        finally:
            del self._answers[number]

    def _running(self) -> CustomCodeProcess:
        if self._process is None:
            raise HandlerError(FailureKind.STOPPED, "Backend Python process is stopped.")
        return self._process

    async def _keep_running(self) -> None:
        num_in_a_row = 0
        while not self.has_failed:
            try:
                if self._process is None:
                    await asyncio.sleep(pause_s(num_in_a_row))
                    self._process = await CustomCodeProcess.start(self._config, lambda: None)
                await self._read(self._process)
            except (HandlerError, LoadError) as error:
                process, self._process = self._process, None
                self.num_failures += 1
                num_in_a_row = 1 if process is not None else num_in_a_row + 1
                log.error("the formatters of %s: %s", self._config.model_name, error)
                if process is not None:
                    await process.kill()
                self._fail(HandlerError(FailureKind.CRASHED, str(error)))
        log.error("the formatters of %s are given up", self._config.model_name)

    async def _read(self, process: CustomCodeProcess) -> None:
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
        formatter: Formatters,
        process: CustomCodeProcess,
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
            "kind": "format",
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
