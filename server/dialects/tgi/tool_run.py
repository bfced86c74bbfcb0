"""A chat whose model need not call a tool: the first run decides, a second one may follow."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from lmi_core.engine.outputs import TokenEvent
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.stats import EngineInfo
from lmi_server.dialects.tgi.tools import NO_TOOL, called_name
from lmi_server.models.backend import Generates


class ToolRun:
    """Implements ``Generates``: a request's events, or those of ``fallback`` when it calls
    ``no_tool``. What is undecided is held back."""

    def __init__(
        self, backend: Generates, fallback: GenerationRequest, on_text: Callable[[], None]
    ) -> None:
        """``on_text`` is called before the events of ``fallback``."""
        self._backend = backend
        self._fallback = fallback
        self._on_text = on_text

    @property
    def max_model_len(self) -> int:
        return self._backend.max_model_len

    @property
    def info(self) -> EngineInfo:
        return self._backend.info

    async def generate_batches(
        self, request: GenerationRequest
    ) -> AsyncGenerator[Sequence[TokenEvent], None]:
        held: list[TokenEvent] = []
        name = None
        async with aclosing(self._backend.generate_batches(request)) as batches:
            async for events in batches:
                held += events
                if name is None:
                    name = called_name("".join(event.text for event in held))
                if name == NO_TOOL:
                    break
                if name is not None:
                    yield held
                    held = []
        if name != NO_TOOL:
            if held:
                yield held
            return
        self._on_text()
        async with aclosing(self._backend.generate_batches(self._fallback)) as batches:
            async for events in batches:
                yield events

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        return await self._backend.encode(text, add_special_tokens=add_special_tokens)
