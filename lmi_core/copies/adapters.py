"""LoRA adapters of a model whose copies have each their own."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lmi_core.adapters.names import AdapterNames
from lmi_core.copies.process import CopyProcess
from lmi_core.engine.lora_slots import adapter_digest, prefix_seed
from lmi_core.errors import EngineError, UserError
from lmi_core.settings.lora_config import LoraConfig

CopiesNow = Callable[[], Sequence[CopyProcess]]
"""Those that take requests when it is called: some come and go by load."""


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
            self._names.add(name, await self._made(path))

    @property
    def paths(self) -> dict[str, Path]:
        """Registered adapters' directories, in order of registration."""
        return {name: adapter.path for name, adapter in self._names.items()}

    @property
    def needed(self) -> dict[str, Path]:
        """What a copy must have before it gets requests."""
        return {**self._leaving, **self.paths}

    @property
    def config(self) -> LoraConfig | None:
        """For a copy that starts."""
        return self._config and replace(self._config, adapters=tuple(self.needed.items()))

    def find(self, name: str) -> SharedAdapter | None:
        """The adapter that a request names, None for the base model. Raises UserError."""
        name = name or ("" if self._config is None else self._config.default)
        if name == "":
            return None
        self._check_enabled()
        return self._names.find(name)

    async def bring(self, copy: CopyProcess) -> None:
        """Have a copy load and unload what was changed since it was started."""
        while copy.adapters != self.needed:
            for name, path in list(copy.adapters.items()):
                if self.needed.get(name) != path:
                    await copy.unload_adapter(name)
            for name, path in list(self.needed.items()):
                if name not in copy.adapters:
                    await copy.load_adapter(name, path)

    async def load(self, name: str, path: Path, copies: CopiesNow) -> None:
        """Register an adapter once all copies have it. Raises UserError for an empty or taken name,
        ModelError for files that can't be served."""
        self._check_enabled()
        if name in self._leaving:
            raise UserError(f"Adapter {name} is still in use", field="adapter")
        tried: list[CopyProcess] = []
        with self._names.claim(name):
            await _load(name, path, copies, tried)
            adapter = await self._made(path)
            await _load(name, path, copies, tried)  # those that have come meanwhile
            self._names.add(name, adapter)

    async def unload(self, name: str, copies: CopiesNow) -> None:
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
        await _unload(name, copies)

    async def _made(self, path: Path) -> SharedAdapter:
        digest = await asyncio.to_thread(adapter_digest, path)
        seed = prefix_seed(next(self._serials), digest if self._outlast else "")
        return SharedAdapter(path, digest, seed)

    def _check_enabled(self) -> None:
        if self._config is None:
            raise UserError("LoRA is not enabled", field="adapter")


async def _load(name: str, path: Path, copies: CopiesNow, tried: list[CopyProcess]) -> None:
    """Have the copies load it that haven't tried; those that are lost may fail, unless all do."""
    while missing := [one for one in copies() if one not in tried and name not in one.adapters]:
        tried += missing
        loads = (copy.load_adapter(name, path) for copy in missing)
        outcomes = await asyncio.gather(*loads, return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        is_there = any(name in copy.adapters for copy in copies())
        if failures and not (is_there and all(map(_is_loss, failures))):
            await _unload(name, copies)
            raise failures[0]


async def _unload(name: str, copies: CopiesNow) -> None:
    having = [copy for copy in copies() if name in copy.adapters]
    outcomes = await asyncio.gather(
        *(copy.unload_adapter(name) for copy in having), return_exceptions=True
    )
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not _is_loss(outcome):
            raise outcome


def _is_loss(error: BaseException) -> bool:
    """Whether it is for the copy's end that a call failed: the next one has what is needed."""
    return isinstance(error, EngineError)
