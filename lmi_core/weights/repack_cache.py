"""A directory of packed weights, one file per model and format, so that a start needn't pack again.

A file's name says what it was made of: the content of the checkpoint, the formats, the instruction
set and the version of the packed layout. It is written beside its place and renamed, so that
readers see whole files only and writers of the same model don't meet. The least recently used files
go when a new one would exceed the limit.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from lmi_core import _native
from lmi_core.weights.content_digest import ContentDigests
from lmi_core.weights.packed_file import PackedFile, write_packed_file

log = logging.getLogger(__name__)

MIN_CHECKPOINT_BYTES = 64 << 20
"""Smaller checkpoints are packed faster than it is worth to keep them."""
_STALE_SECONDS = 3600.0
"""A partial file that nobody has written to for this long has lost its writer."""

_partial_files: set[Path] = set()
"""Those that threads of this process write."""


def discard_partial_files() -> None:
    """Remove what is being written: the process ends without its threads."""
    for path in list(_partial_files):
        with suppress(OSError):
            path.unlink()


_SUFFIX = ".packed"


class RepackCache:
    """Files of packed weights in ``directory``, of at most ``max_bytes`` together."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self.directory = directory
        self.max_bytes = max_bytes
        self.digests = ContentDigests(directory / "sources")

    def may_hold(self, layout: str) -> bool:
        """Whether any model of this layout is here; only then its content must be known."""
        with suppress(OSError):
            return any(path.name.startswith(layout) for path in self._files())
        return False

    def find(self, name: str, node: int = 0) -> PackedFile | None:
        """The file of this name, which counts as used now. A damaged one is taken away. Of NUMA
        nodes but the first each has one of its own, where there is room, so that pages lie in the
        memory of the processes that map them: that of ``node`` then."""
        first = self.directory / (name + _SUFFIX)
        path = self._of_node(first, node) if node > 0 else first
        try:
            packed = PackedFile.open(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            instead = "the weights are packed again" if path == first else f"{first} is"
            log.warning("%s can't be used, %s: %s", path, instead, error)
            self.remove(path)
            return None if path == first else self.find(name)
        with suppress(OSError):  # the directory may be read-only
            os.utime(path)
        return packed

    def _of_node(self, first: Path, node: int) -> Path:
        """Written from the first node's by a process of this one, whose memory the pages are then,
        once: others that come meanwhile wait. The first one itself where that can't be."""
        path = first.with_suffix(f".node{node}{_SUFFIX}")
        try:
            if path.exists():
                return path
            with first.open("r+b") as locked:
                fcntl.lockf(locked, fcntl.LOCK_EX, 1, node)
                return path if path.exists() or self._copied(locked, path) else first
        except OSError as error:
            log.debug("NUMA node %d has no packed weights of its own: %s", node, error)
            return first

    def _copied(self, locked: BinaryIO, path: Path) -> bool:
        """Whether there was room for a copy at ``path``. Raises OSError.

        Nothing else opens the locked file meanwhile: to close it again would give up the lock.
        """
        first = Path(locked.name)
        num_bytes = first.stat().st_size
        num_files = len(list(self._of_nodes(first))) + 2
        os.utime(first)  # the last to make room
        if num_files * num_bytes > self.max_bytes or not self._make_room(num_bytes, path):
            return False
        with self._partial(path) as partial:
            with partial.open("wb") as copy:
                shutil.copyfileobj(locked, copy, 1 << 24)
            partial.rename(path)
        return True

    def _of_nodes(self, first: Path) -> Iterable[Path]:
        return self.directory.glob(f"{first.stem}.node*{_SUFFIX}")

    @contextmanager
    def _partial(self, path: Path) -> Iterator[Path]:
        """Where what is to become ``path`` is written; nothing is left there."""
        partial = path.with_suffix(f".{os.getpid()}-{time.monotonic_ns()}.partial")
        _partial_files.add(partial)
        try:
            yield partial
        finally:
            partial.unlink(missing_ok=True)
            _partial_files.discard(partial)

    def remove(self, path: Path) -> None:
        with suppress(OSError):
            path.unlink()

    def write(
        self,
        name: str,
        matrices: dict[str, _native.LinearWeight],
        should_stop: Callable[[], bool],
    ) -> None:
        """Write a file unless it doesn't fit; nothing is left behind when told to stop.

        Raises OSError.
        """
        num_bytes = sum(weight.num_bytes for weight in matrices.values())
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self.directory / (name + _SUFFIX)
        if not self._make_room(num_bytes, path):
            return
        with self._partial(path) as partial:
            write_packed_file(partial, matrices, should_stop)
            if not should_stop():
                partial.rename(path)
                for copy in self._of_nodes(path):  # this file replaces them
                    self.remove(copy)
                log.info("packed weights are kept in %s (%.0f MiB)", path, num_bytes / 2**20)

    def _make_room(self, num_bytes: int, target: Path) -> bool:
        for path in list(self.directory.glob("*.partial")):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                    path.unlink()
        if num_bytes > self.max_bytes:
            log.info(
                "%.0f MiB of packed weights aren't kept: repack_cache_bytes is %.0f MiB",
                num_bytes / 2**20,
                self.max_bytes / 2**20,
            )
            return False
        by_age = []
        for path in self._files():
            with suppress(OSError):
                status = path.stat()
                by_age.append((status.st_mtime_ns, status.st_size, path))
        by_age.sort()
        total = sum(size for _, size, path in by_age if path != target) + num_bytes
        for _, size, path in by_age:
            if total > self.max_bytes and path != target:
                self.remove(path)
                total -= size
        if shutil.disk_usage(self.directory).free < 2 * num_bytes:
            log.info("%.0f MiB of packed weights aren't kept: disk is scarce", num_bytes / 2**20)
            return False
        return True

    def _files(self) -> Iterable[Path]:
        return self.directory.glob("*" + _SUFFIX)

    def describe(self) -> str:
        """For ``lmi doctor``: where it is and what it holds, or why it isn't used."""
        try:
            sizes = {path: path.stat().st_size for path in self._files()}
        except OSError as error:
            return f"{self.directory}: {error.strerror}"
        existing = next(path for path in (self.directory, *self.directory.parents) if path.exists())
        usable = "" if os.access(existing, os.W_OK) else "; not writable, so nothing is added"
        num_models = len({path.name.partition(".")[0] for path in sizes})
        total = sum(sizes.values()) / 2**20
        return f"{self.directory}: {num_models} models, {total:.0f} MiB{usable}"
