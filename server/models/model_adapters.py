"""The LoRA adapters of a served model, which outlast its engine."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lmi_core.errors import LmiError
from lmi_server.models.backend import AdapterHost

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter as it was registered."""

    name: str
    src: str
    """Where it is, as whoever registered it wrote it."""
    path: Path
    preload: bool = True
    """Asked for; all adapters are loaded when they are registered, and stay."""
    pin: bool = False


class ModelAdapters:
    """By name, in the order of registration; an engine that starts again gets them again."""

    def __init__(self) -> None:
        self._adapters: dict[str, Adapter] | None = None
        self._host: AdapterHost | None = None
        self._configured: set[str] = set()
        """Those of the first engine's own configuration."""
        self._registered: list[Adapter] = []
        """To be given to the first engine."""

    def for_another(self) -> ModelAdapters:
        """Of a model that takes this one's place: has what its own configuration says, and what
        was registered here besides, unless it has another of that name."""
        other = ModelAdapters()
        other._registered = [one for one in self if one.name not in self._configured]
        return other

    @property
    def is_enabled(self) -> bool:
        return self._adapters is not None

    def __iter__(self) -> Iterator[Adapter]:
        return iter(() if self._adapters is None else list(self._adapters.values()))

    def get(self, name: str) -> Adapter | None:
        return None if self._adapters is None else self._adapters.get(name)

    async def attach(self, host: AdapterHost | None) -> None:
        """Know what the engine loaded when it first started; give it what it lacks when it starts
        again, after it was scaled down. None: it has no LoRA."""
        if host is None:
            for adapter in self._registered:
                log.warning("adapter %s goes: the model has LoRA no more", adapter.name)
            return
        self._host = host
        loaded = dict(host.adapters)
        if self._adapters is None:
            self._adapters = {
                name: Adapter(name=name, src=str(path), path=path) for name, path in loaded.items()
            }
            self._configured = set(loaded)
            for adapter in self._registered:
                if adapter.name not in loaded:
                    await self._restore(adapter)
            return
        for name, path in loaded.items():
            known = self._adapters.get(name)
            if known is None or known.path != path:
                await host.unload_adapter(name)
        for adapter in self:
            if adapter.name not in host.adapters:
                await self._restore(adapter)

    async def register(self, adapter: Adapter) -> None:
        """Load it into the running engine; raises what the engine raises."""
        adapters, host = self._running()
        await host.load_adapter(adapter.name, adapter.path)
        adapters[adapter.name] = adapter
        self._configured.discard(adapter.name)

    def update(self, adapter: Adapter) -> None:
        """Keep another preload or pin of an adapter that is registered."""
        adapters, _ = self._running()
        adapters[adapter.name] = adapter

    async def unregister(self, name: str) -> None:
        """At once for new requests; returns when running ones have finished."""
        adapters, host = self._running()
        del adapters[name]
        await host.unload_adapter(name)

    async def _restore(self, adapter: Adapter) -> None:
        try:
            await self.register(adapter)
        except LmiError as error:
            log.error("adapter %s could not be loaded again: %s", adapter.name, error)
            adapters, _ = self._running()
            adapters.pop(adapter.name, None)

    def _running(self) -> tuple[dict[str, Adapter], AdapterHost]:
        assert self._adapters is not None, "LoRA is not enabled"
        assert self._host is not None
        return self._adapters, self._host
