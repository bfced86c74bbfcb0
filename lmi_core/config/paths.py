"""Questions about paths that users wrote: a text that can't be a path simply doesn't exist."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def exists(path: Path) -> bool:
    """Tell whether ``path`` exists; names that are too long or not encodable don't."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def is_dir(path: Path) -> bool:
    """Tell whether ``path`` is a directory."""
    return exists(path) and path.is_dir()


def is_file(path: Path) -> bool:
    """Tell whether ``path`` is a file."""
    return exists(path) and path.is_file()


def first_file(text: str, directories: Sequence[Path]) -> Path:
    """Return the path of a file in the first of the directories that has it, else in the first."""
    paths = [directory / text for directory in directories]
    return next((path for path in paths if is_file(path)), paths[0])
