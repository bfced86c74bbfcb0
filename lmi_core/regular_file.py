"""Files of models: opened only where they are regular ones, so that reading them ends."""

from __future__ import annotations

import errno
import stat
from pathlib import Path
from typing import BinaryIO

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
)


def check_regular(path: Path) -> None:
    """Raise OSError, with the reason as its ``strerror``, unless ``path`` is a regular file or a
    link to one. A FIFO would be waited for, and a device may never end."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "a device")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


def open_regular(path: Path) -> BinaryIO:
    """A regular file, to be read; raises OSError as ``check_regular`` does."""
    check_regular(path)
    return path.open("rb")
