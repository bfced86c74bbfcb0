"""A lock between processes that would fetch the same thing."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Hold the lock of what ends up in ``target``, whose parent directory is made."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(target.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def locked_if_free(target: Path) -> Iterator[bool]:
    """The same without waiting: whether the lock is held."""
    with target.with_name(target.name + ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
