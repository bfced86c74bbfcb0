"""Files that describe a model: read, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lmi_core.errors import ModelError


def read_text(path: Path) -> str:
    """The content of a file; ModelError if it can't be read as UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"Can't read {path}: {error}", field=path.name) from None


def read_json_object(path: Path) -> dict[str, Any]:
    """A file's JSON object, or ModelError."""
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(
            f"{path} is missing: a model directory needs it", field=path.name
        ) from None
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}", field=path.name) from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}", field=path.name) from error
    if not isinstance(values, dict):
        raise ModelError(
            f"{path} must hold a JSON object, found {type(values).__name__}", field=path.name
        )
    return values


def read_json(path: Path) -> dict[str, Any]:
    """As ``read_json_object``; empty if there is no such file."""
    return read_json_object(path) if path.is_file() else {}
