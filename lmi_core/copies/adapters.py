"""LoRA adapters of a model whose copies have each their own."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from lmi_core.adapters.names import AdapterNames
from lmi_core.copies.process import CopyProcess
from lmi_core.engine.lora_slots import adapter_digest, prefix_seed
from lmi_core.errors import EngineError, UserError
from lmi_core.settings.lora_config import LoraConfig


@dataclass(slots=True, eq=False)
class SharedAdapter:
    """An adapter that every copy has."""

    path: Path
    digest: str
    """Of its files."""
    prefix_seed: bytes
    """What tells its blocks from others': new for every load, the same in all copies."""
    num_users: int = 0
    """Open requests."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set without users, once it is leaving."""
    is_leaving: bool = False

    def acquire(self) -> None:
        self.num_users += 1

    def release(self) -> None:
        self.num_users -= 1
        self.settle()

    def settle(self) -> None:
        if self.is_leaving and not self.num_users:
            self.idle.set()


class SharedAdapters:
    """Which adapters requests may name, and which copies must have."""

    def __init__(self, config: LoraConfig | None, *, outlast: bool) -> None:
        """``outlast``: blocks computed with them outlast the copies."""
        self._config = config
        self._outlast = outlast
        self._names: AdapterNames[SharedAdapter] = AdapterNames()
        self._serials = itertools.count()
        self._leaving: dict[str, Path] = {}
        """Unregistered, while requests use them."""

    async def start(self) -> None:
        """Register those that are configured, which copies load as they start."""
        for name, path in () if self._config is None else self._config.adapters:
            await self._add(name, path)

    @property
    def paths(self) -> dict[str, Path]:
        """Registered adapters' directories, in order of registration."""
        return {name: adapter.path for name, adapter in self._names.items()}

    @property
    def needed(self) -> dict[str, Path]:
        """What a copy must have before it gets requests."""
        return {**self._leaving, **self.paths}

    def find(self, name: str) -> SharedAdapter | None:
        """The adapter that a request names, None for the base model. Raises UserError."""
        name = name or ("" if self._config is None else self._config.default)
        if name == "":
            return None
        self._check_enabled()
        return self._names.find(name)

    async def bring(self, copy: CopyProcess) -> None:
        """Have a copy load and unload what was changed since it was started."""
        while copy.adapters.keys() != self.needed.keys():
            for name in [name for name in copy.adapters if name not in self.needed]:
                await copy.unload_adapter(name)
            for name, path in list(self.needed.items()):
                if name not in copy.adapters:
                    await copy.load_adapter(name, path)

    async def load(self, name: str, path: Path, copies: Iterable[CopyProcess]) -> None:
        """Register an adapter once all copies have it. Raises UserError for an empty or taken name,
        ModelError for files that can't be served."""
        self._check_enabled()
        if name in self._leaving:
            raise UserError(f"Adapter {name} is still in use", field="adapter")
        copies = list(copies)
        with self._names.claim(name):
            loads = (copy.load_adapter(name, path) for copy in copies)
            outcomes = await asyncio.gather(*loads, return_exceptions=True)
            failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
            if failures and not (len(failures) < len(copies) and all(map(_is_loss, failures))):
                have = [copy for copy in copies if name in copy.adapters]
                await _unload(name, have)
                raise failures[0]
            await self._add(name, path)

    async def unload(self, name: str, copies: Iterable[CopyProcess]) -> None:
        """Refuse an adapter to new requests, wait for its running ones and free its memory. Raises
        UserError for a name that isn't registered."""
        adapter = self._names.remove(name)
        self._leaving[name] = adapter.path
        adapter.is_leaving = True
        adapter.settle()
        try:
            await adapter.idle.wait()
        finally:
            del self._leaving[name]
        await _unload(name, [copy for copy in copies if name in copy.adapters])

    async def _add(self, name: str, path: Path) -> None:
        digest = await asyncio.to_thread(adapter_digest, path)
        seed = prefix_seed(next(self._serials), digest if self._outlast else "")
        self._names.add(name, SharedAdapter(path, digest, seed))

    def _check_enabled(self) -> None:
        if self._config is None:
            raise UserError("LoRA is not enabled", field="adapter")


async def _unload(name: str, copies: list[CopyProcess]) -> None:
    outcomes = await asyncio.gather(
        *(copy.unload_adapter(name) for copy in copies), return_exceptions=True
    )
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not _is_loss(outcome):
            raise outcome


def _is_loss(error: BaseException) -> bool:
    """Whether it is for the copy's end that a call failed: the next one has what is needed."""
    return isinstance(error, EngineError)
