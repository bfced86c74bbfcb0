"""Where a user's caches are."""

from __future__ import annotations

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
