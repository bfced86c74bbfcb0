"""Requests to an engine and its answers in the forms of a model's own formatters."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from aiohttp import web

from lmi_core.custom_code.formatters import Formatters
from lmi_core.engine.engine import Engine
from lmi_core.engine.outputs import TokenEvent
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.stats import EngineInfo, EngineStats
from lmi_core.settings.custom_code_config import CustomCodeConfig
from lmi_core.text.tokenizer import Tokenizer
from lmi_server.dialects.base import Call
from lmi_server.dialects.generation import Read
from lmi_server.dialects.lmi.formatted import FormattedEvents, FormattedRequest
from lmi_server.http.form import handler_request


class FormattingBackend:
    """An engine and the process of its model's formatters, started and stopped together."""

    def __init__(self, engine: Engine, config: CustomCodeConfig) -> None:
        self._engine = engine
        self._formatters = Formatters(config)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await self._formatters.start()
            stack.push_async_callback(self._formatters.stop)
            await stack.enter_async_context(self._engine)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.__aexit__(kind, error, traceback)

    @property
    def healthy(self) -> bool:
        return self._engine.healthy and not self._formatters.has_failed

    async def generate_batches(
        self, request: GenerationRequest
    ) -> AsyncGenerator[Sequence[TokenEvent], None]:
        batches = self._engine.generate_batches(request)
        if not isinstance(request, FormattedRequest):
            async with aclosing(batches):
                async for events in batches:
                    yield events
            return
        stream = self._formatters.open(request.text, request.parameters, request.input_number)
        try:
            async with aclosing(batches):
                async for events in batches:
                    formatted = FormattedEvents(events)
                    formatted.frame = await stream.format(events)
                    if formatted.frame or stream.failure is None:
                        yield formatted
                    if stream.failure is not None:
                        raise stream.failure
        finally:
            stream.close()

    @property
    def reader(self) -> Read | None:
        """What makes calls of requests where the model has a function for that."""
        return self._read if self._formatters.reads_inputs else None

    @asynccontextmanager
    async def _read(self, request: web.Request, call: Call) -> AsyncIterator[Call]:
        """The call with the body that the model's own function makes of what was sent."""
        given = await handler_request(request, call.body)
        async with self._formatters.read(given) as (body, number):
            yield replace(call, body=body, content_type="application/json", input_number=number)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    @property
    def adapters(self) -> dict[str, Path]:
        return self._engine.adapters

    async def load_adapter(self, name: str, path: Path) -> None:
        await self._engine.load_adapter(name, path)

    async def unload_adapter(self, name: str) -> None:
        await self._engine.unload_adapter(name)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        return await self._engine.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._engine.decode(token_ids)
