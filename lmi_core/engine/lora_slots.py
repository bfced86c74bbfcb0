"""Registered LoRA adapters: their names, their slots in the runner, and who uses them."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lmi_core.adapters.names import AdapterNames
from lmi_core.errors import ModelError, UserError
from lmi_core.runners.runner import AdapterStore, LoraRunner, Runner
from lmi_core.weights.content_digest import ContentDigests

if TYPE_CHECKING:
    from lmi_core.adapters.store import PackedLora

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class LoraSlot:
    """A loaded adapter, until nobody uses it any more."""

    name: str
    path: Path
    index: int
    """What steps call it by."""
    prefix_seed: bytes
    """What tells its blocks from others': new for every load, or its content where blocks outlast
    the process."""
    digest: str = ""
    """Of its files."""
    num_users: int = 0
    """Sequences that aren't finished."""
    on_idle: Callable[[], None] | None = None
    """Set when it is unregistered; called when the last user has gone."""

    def acquire(self) -> None:
        self.num_users += 1

    def release(self) -> None:
        """No step that was submitted refers to it on behalf of this user."""
        self.num_users -= 1
        self.settle()

    def settle(self) -> None:
        """Call ``on_idle`` if that is due."""
        if self.num_users == 0 and self.on_idle is not None:
            self.on_idle()


class LoraSlots:
    """Gives adapters slots, and takes a slot back when no sequence and no step refers to it.

    Used in the thread of the engine's loop only.
    """

    def __init__(self, runner: Runner, default: str = "", *, outlast: bool = False) -> None:
        """``default``: the adapter of requests that name none; "": they are the base model's.
        ``outlast``: blocks are kept on a disk."""
        self._default = default
        self._outlast = outlast
        self._store: AdapterStore | None = None
        if runner.info.has_adapters:
            self._store = cast(LoraRunner, runner).adapters
        self._slots: AdapterNames[LoraSlot] = AdapterNames()
        self._free_indices: list[int] = []
        self._num_indices = 0
        self._serials = itertools.count()

    @property
    def paths(self) -> dict[str, Path]:
        """Registered adapters' directories, in order of registration."""
        return {name: slot.path for name, slot in self._slots.items()}

    def find(self, name: str) -> LoraSlot | None:
        """The adapter that a request names, None for the base model. Raises UserError."""
        name = name or self._default
        if name == "":
            return None
        self._enabled_store()
        return self._slots.find(name)

    async def load(self, name: str, path: Path) -> None:
        """Register an adapter. Raises UserError for an empty or taken name, ModelError for files
        that can't be served."""
        store = self._enabled_store()
        with self._slots.claim(name):
            before = await asyncio.to_thread(adapter_digest, path)
            packed = await asyncio.to_thread(store.pack, path)
            digest = await asyncio.to_thread(adapter_digest, path)
            if digest != before:
                raise ModelError(f"adapter {name}: files in {path} changed while they were read")
            self.register(name, path, packed, digest)
        _log.info("adapter %s: %.1f MiB, from %s", name, packed.num_bytes / 2**20, path)

    def register(self, name: str, path: Path, packed: PackedLora, digest: str = "") -> None:
        """Let requests name an adapter that was packed."""
        index = self._take_index()
        self._enabled_store().set(index, packed)
        seed = prefix_seed(next(self._serials), digest if self._outlast else "")
        self._slots.add(name, LoraSlot(name, path, index, seed, digest))

    def unregister(self, name: str, on_freed: Callable[[], None]) -> None:
        """Refuse new requests for an adapter, and free its memory as soon as its last sequence has
        finished; then ``on_freed`` is called. Raises UserError."""
        slot = self.find(name)
        if slot is None:
            raise UserError("the base model can't be unloaded", field="adapter")
        self._slots.remove(name)

        def free() -> None:
            self._enabled_store().set(slot.index, None)
            self._free_indices.append(slot.index)
            on_freed()

        slot.on_idle = free
        slot.settle()

    def _enabled_store(self) -> AdapterStore:
        if self._store is None:
            raise UserError("LoRA is not enabled", field="adapter")
        return self._store

    def _take_index(self) -> int:
        if self._free_indices:
            return self._free_indices.pop()
        self._num_indices += 1
        return self._num_indices - 1


def prefix_seed(serial: int, digest: str) -> bytes:
    """What tells an adapter's blocks from others': by its content, where blocks outlast the engine,
    else by the number of its load."""
    # No text's encoding begins with this byte, so that no salt of the base model is the same.
    return b"\xff" + (bytes.fromhex(digest) if digest else serial.to_bytes(8, "little"))


def adapter_digest(path: Path) -> str:
    """Of an adapter's files; "" where they can't be read."""
    try:
        files = sorted(file for file in path.iterdir() if file.is_file())
        return ContentDigests(None).of_files(files)
    except OSError as error:
        _log.info("the adapter in %s has no digest: %s", path, error)
        return ""
