"""What files hold, as a SHA-256 digest that is computed once for each state of a file."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path

log = logging.getLogger(__name__)

_PIECE_BYTES = 4 << 20
_SETTLED_NS = 2_000_000_000
"""A file changed this recently could change again within a tick of its file system's clock."""
_MAX_MEMOS = 1000


@dataclass(frozen=True, slots=True)
class FileState:
    """Which file it is and when it was last touched.

    Every write moves the change time on, and no system call sets it back; so a state that was seen
    again some time after it arose stands for the same bytes.
    """

    path: Path
    device: int
    inode: int
    num_bytes: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        """Raises OSError."""
        status = path.stat()
        return cls(
            path.resolve(),
            status.st_dev,
            status.st_ino,
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
        )

    @property
    def name(self) -> str:
        return hashlib.sha256(repr(astuple(self)).encode()).hexdigest()[:32]

    def is_current(self) -> bool:
        """Whether the file is still in this state."""
        try:
            return FileState.of(self.path) == self
        except OSError:
            return False


class Interrupted(Exception):
    """Hashing was told to stop."""


class ContentDigests:
    """Digests of files, remembered in ``directory`` by the files' states; None: nowhere."""

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory

    def of(
        self, state: FileState, num_threads: int, should_stop: Callable[[], bool] = lambda: False
    ) -> str:
        """The digest of a file in ``state``.

        Raises OSError if it can't be read or has changed since, Interrupted if told to stop.
        """
        if self.directory is None:
            return _unchanged(state, num_threads, should_stop)
        memo = self.directory / state.name
        with suppress(OSError):
            text = memo.read_text("ascii", "replace")
            if len(text) == 64:
                os.utime(memo)
                return text
        is_settled = time.time_ns() - state.changed_ns > _SETTLED_NS
        digest = _unchanged(state, num_threads, should_stop)
        if is_settled:
            self._remember(memo, digest)
        return digest

    def of_files(
        self, paths: Iterable[Path], should_stop: Callable[[], bool] = lambda: False
    ) -> str:
        """Of their names and contents. Raises as ``of``."""
        total = hashlib.sha256()
        for path in paths:
            total.update(f"{path.name} {self.of(FileState.of(path), 1, should_stop)}\n".encode())
        return total.hexdigest()

    def _remember(self, memo: Path, digest: str) -> None:
        try:
            memo.parent.mkdir(parents=True, exist_ok=True)
            partial = memo.with_suffix(f".{os.getpid()}.partial")
            partial.write_text(digest)
            partial.rename(memo)
            memos = sorted(memo.parent.iterdir(), key=lambda path: path.stat().st_mtime_ns)
            for old in memos[:-_MAX_MEMOS]:
                old.unlink(missing_ok=True)
        except OSError as error:
            log.debug("digest of %s isn't remembered: %s", memo.name, error)


def _unchanged(state: FileState, num_threads: int, should_stop: Callable[[], bool]) -> str:
    digest = _digest(state, num_threads, should_stop)
    if not state.is_current():
        raise OSError(f"{state.path} changed while it was read")
    return digest


def _digest(state: FileState, num_threads: int, should_stop: Callable[[], bool]) -> str:
    """The digest of the digests of all pieces, which threads share."""
    descriptor = os.open(state.path, os.O_RDONLY | os.O_CLOEXEC)
    try:

        def piece_digest(offset: int) -> bytes:
            if should_stop():
                raise Interrupted
            return hashlib.sha256(os.pread(descriptor, _PIECE_BYTES, offset)).digest()

        total = hashlib.sha256()
        with ThreadPoolExecutor(num_threads) as threads:
            for digest in threads.map(piece_digest, range(0, state.num_bytes, _PIECE_BYTES)):
                total.update(digest)
        return total.hexdigest()
    finally:
        os.close(descriptor)
