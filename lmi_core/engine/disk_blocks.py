"""KV blocks in files, one each: written behind the engine, read back for prefixes it saw before.

A model's blocks lie in a directory named after all that decides their bits, and each is named by
its prefix hash, which a secret of the installation, the adapter's content and the tenant's salt go
into. A file is complete when it has its name, and its content is believed only if the digest in
front of it agrees: keyed, of the name and the content's checksum. One process writes, the one that
has the lock; others only read. Whatever goes wrong costs nothing but the blocks.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import cast

from lmi_core._native import checksum
from lmi_core.errors import EngineError
from lmi_core.runners.prefix_secret import derived, installation_secret
from lmi_core.runners.runner import BlockContent, BlockRunner, Runner
from lmi_core.settings.engine_config import EngineConfig

log = logging.getLogger(__name__)

_SUFFIX, _PARTIAL = ".kv", ".partial"
_DIGEST_BYTES = 32
_CLOSE_S = 10.0
_MAX_PENDING_BYTES = 128 << 20
"""Copies of blocks that wait to be written; more aren't taken."""
_MAX_SPARE_BYTES = 64 << 20
"""Memory of copies that is kept for the next ones, as many as come at once where sequences fill
their blocks in the same step: fresh pages cost four times as much as copying."""
_FORMAT = "2"
"""Of the files: blocks of another one are another model's."""


class DiskBlocks:
    """``keep`` and ``has`` are for the engine's loop and touch no file; ``read`` is for threads."""

    def __init__(
        self, directory: Path, model_key: str, *, block_bytes: int, max_bytes: int
    ) -> None:
        """Open or make the directory of a model, of which ``model_key`` says everything that its
        blocks' bits depend on. ``max_bytes``: of all models in ``directory``. Raises OSError."""
        self._secret = installation_secret(directory)
        self._root = directory
        name = derived(self._secret, f"model {model_key} {_FORMAT}", 16).hex()
        self._directory = directory / name
        self._directory.mkdir(mode=0o700, exist_ok=True)
        self._key = derived(self._secret, "block digests", _DIGEST_BYTES)
        self._block_bytes = block_bytes
        self._file_bytes = block_bytes + _DIGEST_BYTES
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._names: OrderedDict[str, None] = OrderedDict()
        """Blocks that are there, the least recently used first."""
        self._other_bytes = 0
        """Of other models."""
        self._pending: set[str] = set()
        self._queue: queue.SimpleQueue[tuple[str, bytearray, BlockContent | None] | None]
        self._queue = queue.SimpleQueue()
        self._spare: list[bytearray] = []
        self._said: set[str] = set()
        self._lock_file = self._take_lock()
        self._thread: threading.Thread | None = None
        self._find()
        if self._lock_file is not None:
            self._thread = threading.Thread(target=self._run, name="disk-blocks", daemon=True)
            self._thread.start()

    @property
    def num_blocks(self) -> int:
        return len(self._names)

    @property
    def is_writer(self) -> bool:
        return self._thread is not None

    def has(self, block_hash: bytes) -> bool:
        return block_hash.hex() in self._names

    def keep(self, block_hash: bytes, copy: Callable[[bytearray], BlockContent | None]) -> None:
        """Have a block written, which ``copy`` is called at once to put into memory, unless it is
        there, or there is more to be written than the disk can take."""
        name = block_hash.hex()
        if self._thread is None or name in self._names or name in self._pending:
            return
        if (len(self._pending) + 1) * self._block_bytes > _MAX_PENDING_BYTES:
            return
        try:
            content = self._memory()
        except MemoryError:
            self._say("no memory is left to copy blocks for the disk: some aren't written")
            return
        rest = copy(content)
        with self._lock:
            self._pending.add(name)
        self._queue.put((name, content, rest))

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
        """Write what waits, and let another process be the writer."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_CLOSE_S)
            self._thread = None
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
        for path in self._root.glob("*/*"):
            with suppress(OSError):
                status = path.stat()
                if path.suffix == _PARTIAL and path.parent == self._directory:
                    if self._lock_file is not None:
                        path.unlink()
                elif path.suffix == _SUFFIX:
                    found.append((status.st_mtime_ns, status.st_size, path))
        found.sort()
        own = [(size, path.stem) for _, size, path in found if path.parent == self._directory]
        self._names = OrderedDict.fromkeys(name for size, name in own if size == self._file_bytes)
        excess = sum(size for _, size, _ in found) - self._max_bytes
        self._other_bytes = sum(size for _, size, _ in found) - sum(size for size, _ in own)
        if self._lock_file is None:
            return
        for _, size, path in found:
            if excess <= 0:
                break
            excess -= size
            if path.parent == self._directory:
                self._names.pop(path.stem, None)
            else:
                self._other_bytes -= size
            with suppress(OSError):
                path.unlink()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            name, content, rest = item
            try:
                if rest is not None:
                    rest.result()
                try:
                    self._write(name, content)
                except FileNotFoundError:
                    self._make_again()
                    self._write(name, content)
            except OSError as error:
                self._say(f"blocks aren't written to {self._directory}: {error.strerror or error}")
            except EngineError as error:
                self._say(f"a block isn't written to {self._directory}: {error}")
            with self._lock:
                self._pending.discard(name)
            self.give_back([content])

    def _make_again(self) -> None:
        """Begin anew in place of a directory that was removed, under the secret that hashes are
        made with; raises OSError where that isn't to be."""
        if installation_secret(self._root, self._secret) != self._secret:
            raise OSError("it was made anew by another process, whose prefixes it has now")
        self._directory.mkdir(mode=0o700, exist_ok=True)
        if self._lock_file is not None:
            os.close(self._lock_file)
        self._lock_file = self._take_lock()
        with self._lock:
            self._find()
        log.warning("%s was removed; it is made again, empty", self._directory)

    def _memory(self) -> bytearray:
        """Of a block, whatever it holds."""
        try:
            return self._spare.pop()
        except IndexError:
            return bytearray(self._block_bytes)

    def _write(self, name: str, content: bytearray) -> None:
        if self._lock_file is None:
            return
        self._make_room()
        if self._file_bytes + self._other_bytes > self._max_bytes:
            return
        partial = self._directory / (name + _PARTIAL)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            descriptor = os.open(partial, flags, 0o600)
            try:
                parts = (self._digest(name, content), content)
                if os.writev(descriptor, parts) < self._file_bytes:
                    raise OSError("the disk is full")
            finally:
                os.close(descriptor)
            partial.rename(self._path(name))
        except OSError:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
        with self._lock:
            self._names[name] = None

    def _make_room(self) -> None:
        """Remove the least recently used until one more fits."""
        while (
            self._names
            and (len(self._names) + 1) * self._file_bytes + self._other_bytes > self._max_bytes
        ):
            with self._lock:
                name, _ = self._names.popitem(last=False)
            with suppress(OSError):
                self._path(name).unlink()

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
        digest, content, more = bytearray(_DIGEST_BYTES), self._memory(), bytearray(1)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                num_bytes = os.readv(descriptor, (digest, content, more))
            finally:
                os.close(descriptor)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                self._say(f"a block can't be read from {self._directory}: {error.strerror}")
            self._forget(name)
            return None
        if num_bytes != self._file_bytes or digest != self._digest(name, content):
            log.warning("%s is damaged; it is computed again", path)
            self._forget(name)
            with suppress(OSError):
                path.unlink()
            return None
        with self._lock:
            if name in self._names:
                self._names.move_to_end(name)
        with suppress(OSError):  # for the order after the next start; of others' files not ours
            os.utime(path)
        return content

    def _digest(self, name: str, content: bytearray) -> bytes:
        text = f"{name} {checksum(content)}"
        return hashlib.blake2b(text.encode(), key=self._key, digest_size=_DIGEST_BYTES).digest()

    def _forget(self, name: str) -> None:
        with self._lock:
            self._names.pop(name, None)

    def _path(self, name: str) -> Path:
        return self._directory / (name + _SUFFIX)

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            log.warning(text)


def open_disk_blocks(
    config: EngineConfig, runner: Runner, fingerprint: str | None
) -> DiskBlocks | None:
    """What ``prefix_cache_dir`` keeps of this model; None where it keeps nothing."""
    directory = config.prefix_cache_dir
    if directory is None or not config.enable_prefix_caching or not runner.info.shares_blocks:
        return None
    if fingerprint is None:
        log.warning("no prefixes are kept in %s: the model's files can't be read", directory)
        return None
    num_bytes = cast(BlockRunner, runner).cache.bytes_per_block
    try:
        disk = DiskBlocks(
            directory, fingerprint, block_bytes=num_bytes, max_bytes=config.prefix_cache_bytes
        )
    except OSError as error:
        log.warning("no prefixes are kept in %s: %s", directory, error.strerror or error)
        return None
    log.info("%d blocks of prefixes are in %s", disk.num_blocks, directory)
    return disk
