"""A user's files: those that describe a model, opened only where they are regular ones, so that
reading them ends, and read as bytes, text or JSON, or refused by name; and where caches are."""

from __future__ import annotations

import errno
import io
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from lmi_core.errors import ModelError

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


def check_readable(path: Path) -> None:
    """Raise ModelError unless ``path`` is a regular file, or a link to one."""
    try:
        check_regular(path)
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}", field=path.name) from None


def read_bytes(path: Path) -> bytes:
    """The content of a file; ModelError if it isn't there or can't be read."""
    try:
        with open_regular(path) as file:
            return file.read()
    except FileNotFoundError:
        raise ModelError(
            f"{path} is missing: a model directory needs it", field=path.name
        ) from None
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}", field=path.name) from error


def read_text(path: Path) -> str:
    """The same as text; ModelError if it isn't UTF-8."""
    try:
        return io.TextIOWrapper(io.BytesIO(read_bytes(path)), encoding="utf-8").read()
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} can't be read: {error}", field=path.name) from None


def read_json_object(path: Path) -> dict[str, Any]:
    """A file's JSON object, or ModelError."""
    try:
        values = json.loads(read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}", field=path.name) from error
    if not isinstance(values, dict):
        raise ModelError(
            f"{path} must hold a JSON object, found {type(values).__name__}", field=path.name
        )
    return values


def read_json(path: Path) -> dict[str, Any]:
    """As ``read_json_object``; empty if there is no such file."""
    return read_json_object(path) if path.exists() else {}


def user_cache(environ: Mapping[str, str]) -> Path:
    """``XDG_CACHE_HOME``, or ``~/.cache``; for a user without a home, as containers may have, a
    path at which nothing can be made, which is dealt with as a home that can't be written to."""
    if base := environ.get("XDG_CACHE_HOME"):
        return Path(base).expanduser()
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        return Path("/dev/null")


def repack_directory(setting: str) -> Path | None:
    """Of packed weights: the directory that ``repack_cache_dir`` names; None: they aren't kept."""
    if setting == "none":
        return None
    if setting != "auto":
        return Path(setting).expanduser()
    directory = user_cache(os.environ) / "lmi" / "packed"
    return directory if directory.is_absolute() else None
