"""KV blocks in files, one each: written behind the engine, read back for prefixes it saw before.

A model's blocks lie in a directory named after all that decides their bits, and each is named by
its prefix hash, which a secret of the installation, the adapter's content and the tenant's salt go
into. A file's content is believed only if the digest behind it agrees (``csrc/kv/block_file.h``).
One process writes, the one that has the lock; others only read. Files have their names from the
start: half of one has another size or digest, and is removed by the model's next writer, or when
it is the oldest of all models' and there is no room. Whatever goes wrong costs nothing but the
blocks.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lmi_core._native import BlockWriter, block_file_bytes, read_block_file
from lmi_core.runners.prefix_secret import derived, installation_secret
from lmi_core.runners.runner import BlockMemory, BlockRunner, Runner
from lmi_core.settings.engine_config import EngineConfig

if TYPE_CHECKING:
    from lmi_core._native import BlockPool

log = logging.getLogger(__name__)

_SUFFIX = ".kv"
_CLOSE_S = 10.0
_MAX_PENDING_BYTES = 128 << 20
"""Blocks that wait to be written; more aren't taken."""
_MAX_SPARE_BYTES = 64 << 20
"""Memory of blocks that were read which is kept for the next ones: fresh pages cost four times as
much as copying."""
_FORMAT = "3"
"""Of the files: blocks of another one are another model's."""


class DiskBlocks:
    """For the engine's loop, where it touches no file; ``read`` is for threads."""

    def __init__(
        self,
        directory: Path,
        model_key: str,
        pool: BlockPool,
        memory: BlockMemory,
        *,
        max_bytes: int,
    ) -> None:
        """Open or make the directory of a model, of which ``model_key`` says everything that its
        blocks' bits depend on. ``max_bytes``: of all models in ``directory``. Raises OSError."""
        self._secret = installation_secret(directory)
        self._root = directory
        name = derived(self._secret, f"model {model_key} {_FORMAT}", 16).hex()
        self._directory = directory / name
        self._directory.mkdir(mode=0o700, exist_ok=True)
        self._key = derived(self._secret, "block digests", 16)
        self._memory = memory
        self._block_bytes = memory.bytes_per_block
        self._file_bytes = block_file_bytes(self._block_bytes)
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._closing = threading.Lock()
        self._names: OrderedDict[str, int] = OrderedDict()
        """Bytes of the blocks that are there, the least recently used first; those that other
        models had at the start by their place beside this one's."""
        self._num_bytes = 0
        """Of all these."""
        self._pending: set[str] = set()
        self._spare: list[bytearray] = []
        self._said: set[str] = set()
        self._lock_file = self._take_lock()
        self._find()
        self._writer: BlockWriter | None = None
        if self._lock_file is not None:
            path, key = str(self._directory), self._key
            self._writer = BlockWriter(pool, memory, path, key, self._block_bytes)
        self._is_gone = False
        """The directory was removed: it is made again once nothing waits to be written there."""
        self._maker: threading.Thread | None = None
        """Who makes it again, or couldn't: nothing is written meanwhile."""

    @property
    def num_blocks(self) -> int:
        """Those that are whole."""
        self._settle()
        return sum("/" not in name for name in self._names)

    @property
    def is_writer(self) -> bool:
        return self._writer is not None and self._lock_file is not None

    def has(self, block_hash: bytes) -> bool:
        self._settle()
        return block_hash.hex() in self._names

    def keep(self, block_hash: bytes, block_id: int) -> None:
        """Have a full block written, unless it is there, or there is more to be written than the
        disk can take, or it is evicted before its turn."""
        self._settle()
        name = block_hash.hex()
        is_known = name in self._names or name in self._pending
        if is_known or self._writer is None or self._is_gone:
            return
        num_pending = len(self._pending) + 1
        if num_pending * self._block_bytes > _MAX_PENDING_BYTES or not self._make_room(num_pending):
            return
        self._pending.add(name)
        try:
            self._memory.write_out(self._writer, name + _SUFFIX, block_id)
        except MemoryError:
            self._pending.discard(name)
            self._say("no memory is left to copy blocks that are to be written")

    def read(self, hashes: Iterable[bytes]) -> list[bytearray]:
        """The contents of leading blocks, up to the first that isn't there or isn't whole, until
        they are given back."""
        names = [block_hash.hex() for block_hash in hashes]
        for name in names:
            self._ask_for(name)
        contents = []
        for name in names:
            content = self._read(name)
            if content is None:
                break
            contents.append(content)
        return contents

    def give_back(self, contents: Iterable[bytearray]) -> None:
        """Let memory that ``read`` returned be used again."""
        for content in contents:
            if len(self._spare) * self._block_bytes < _MAX_SPARE_BYTES:
                self._spare.append(content)

    def close(self) -> None:
        """Write what waits, and let another process be the writer. Idempotent, in any thread."""
        with self._closing:
            if self._writer is not None:
                self._writer.close(_CLOSE_S)
                self._settle()
                self._writer = None
            if (maker := self._maker) is not None:
                maker.join()
            if self._lock_file is not None:
                os.close(self._lock_file)
                self._lock_file = None

    def _take_lock(self) -> int | None:
        """None: another process writes, or nothing can be written."""
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            descriptor = os.open(self._directory / "lock", flags, 0o600)
        except OSError as error:
            self._say(f"nothing is added to {self._directory}: {error.strerror}")
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            self._say(f"another process writes to {self._directory}: this one only reads")
            return None
        return descriptor

    def _find(self) -> None:
        """Note what is there, oldest first, and remove what a writer left half done."""
        found = []
        for path in self._root.glob("*/*" + _SUFFIX):
            with suppress(OSError):
                status = path.stat()
                is_own = path.parent == self._directory
                if not is_own or status.st_size == self._file_bytes:
                    name = path.stem if is_own else f"../{path.parent.name}/{path.stem}"
                    found.append((status.st_mtime_ns, name, status.st_size))
                elif self._lock_file is not None:
                    path.unlink()
        with self._lock:
            self._names = OrderedDict((name, size) for _, name, size in sorted(found))
            self._num_bytes = sum(self._names.values())
        for name in [] if self._lock_file is None else self._forget_oldest(self._max_bytes):
            with suppress(OSError):
                self._path(name).unlink()

    def _settle(self) -> None:
        """Take notice of what was written."""
        for file, error in () if self._writer is None else self._writer.take_outcomes():
            name = file.removesuffix(_SUFFIX)
            self._pending.discard(name)
            if error == 0:
                with self._lock:
                    self._names[name] = self._file_bytes
                    self._num_bytes += self._file_bytes
            elif error == errno.ENOENT:
                self._is_gone = True
            elif error != errno.ECANCELED:
                self._say(f"blocks aren't written to {self._directory}: {os.strerror(error)}")
        if self._is_gone and self._maker is None and not self._pending:
            self._maker = threading.Thread(target=self._make_again, name="disk-blocks")
            try:
                self._maker.start()
            except RuntimeError as error:
                self._maker = None
                self._say(f"{self._directory} was removed and isn't made again: {error}")

    def _make_again(self) -> None:
        """Begin anew in place of a directory that was removed, under the secret that hashes are
        made with; where that isn't to be, nothing is written from now on."""
        try:
            if installation_secret(self._root, self._secret) != self._secret:
                raise OSError("it was made anew by another process, whose prefixes it has now")
            self._directory.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            self._say(f"blocks aren't written to {self._directory}: {error.strerror or error}")
            return
        if self._lock_file is not None:
            os.close(self._lock_file)
        self._lock_file = self._take_lock()
        self._find()
        log.warning("%s was removed; it is made again, empty", self._directory)
        if self._lock_file is not None:
            self._maker, self._is_gone = None, False

    def _make_room(self, num_new: int) -> bool:
        """Remove the least recently used until so many more fit; whether they do."""
        assert self._writer is not None
        left_bytes = self._max_bytes - num_new * self._file_bytes
        for name in self._forget_oldest(left_bytes):
            self._writer.remove(name + _SUFFIX)
        return self._num_bytes <= left_bytes

    def _forget_oldest(self, num_bytes: int) -> list[str]:
        """The names of those that there are beyond so many bytes."""
        names = []
        with self._lock:
            while self._names and self._num_bytes > num_bytes:
                name, size = self._names.popitem(last=False)
                self._num_bytes -= size
                names.append(name)
        return names

    def _ask_for(self, name: str) -> None:
        """Have the drive read a file while others are waited for."""
        with suppress(OSError):  # who reads it says so
            descriptor = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)

    def _read(self, name: str) -> bytearray | None:
        path = self._path(name)
        try:
            content = self._spare.pop()
        except IndexError:
            content = bytearray(self._block_bytes)
        try:
            is_whole = read_block_file(str(path), self._key, path.name, content)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                self._say(f"a block can't be read from {self._directory}: {error.strerror}")
            self._forget(name)
            return None
        if not is_whole:
            log.warning("%s is damaged; it is computed again", path)
            self._forget(name)
            if self.is_writer and name not in self._pending:
                with suppress(OSError):
                    path.unlink()
            return None
        with self._lock:
            if name in self._names:
                self._names.move_to_end(name)
        with suppress(OSError):  # the next start orders by it; others' files aren't ours
            os.utime(path)
        return content

    def _forget(self, name: str) -> None:
        with self._lock:
            self._num_bytes -= self._names.pop(name, 0)

    def _path(self, name: str) -> Path:
        return self._directory / (name + _SUFFIX)

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            log.warning(text)


def open_disk_blocks(
    directory: Path, config: EngineConfig, runner: Runner, fingerprint: str | None
) -> DiskBlocks | None:
    """What ``prefix_cache_dir`` keeps of this model; None where it keeps nothing."""
    if not config.enable_prefix_caching or not runner.info.shares_blocks:
        return None
    if fingerprint is None:
        log.warning("no prefixes are kept in %s: the model's files can't be read", directory)
        return None
    memory, max_bytes = cast(BlockRunner, runner).cache, config.prefix_cache_bytes
    try:
        disk = DiskBlocks(directory, fingerprint, runner.pool, memory, max_bytes=max_bytes)
    except OSError as error:
        log.warning("no prefixes are kept in %s: %s", directory, error.strerror or error)
        return None
    log.info("%d blocks of prefixes are in %s", disk.num_blocks, directory)
    return disk
