"""The JSON files that describe a model's text: read, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmi_core.errors import ModelError


def read_text(path: Path) -> str:
    """The content of a file; ModelError if it can't be read as UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"Can't read {path}: {error}", field=path.name) from None


def read_json(path: Path) -> Mapping[str, Any]:
    """The object in a file, empty if there is none; ModelError if it isn't one."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}", field=path.name) from None
    if not isinstance(content, dict):
        raise ModelError(
            f"{path} must hold a JSON object, found {type(content).__name__}", field=path.name
        )
    return content
