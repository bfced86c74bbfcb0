"""Where a user's caches are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


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
