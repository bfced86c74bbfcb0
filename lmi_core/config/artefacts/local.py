"""Check of a model directory: the files are there, and no weight file is cut short.

Source of the format: the safetensors specification (an 8-byte little-endian header length, a JSON
header whose data_offsets cover the rest of the file).
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from lmi_core.config.paths import is_dir
from lmi_core.errors import ModelError
from lmi_core.models.checkpoint import no_safetensors

INDEX = "model.safetensors.index.json"

_MAX_HEADER_BYTES = 100_000_000


def check_directory(directory: Path) -> None:
    """Raise ModelError, naming the file, unless ``directory`` holds a whole model."""
    if not is_dir(directory):
        raise ModelError(f"model directory {directory} doesn't exist", field="option.model_id")
    if not os.access(directory, os.R_OK | os.X_OK):
        raise ModelError(
            f"model directory {directory} can't be read: Permission denied",
            field="option.model_id",
        )
    if not (directory / "config.json").is_file():
        raise ModelError(
            f"{directory} has no config.json: give a model as saved by Transformers",
            field="option.model_id",
        )
    for path in weight_files(directory):
        check_safetensors(path)


def weight_files(directory: Path) -> list[Path]:
    """Return the weight files that the directory's index lists, or those that are there."""
    index = directory / INDEX
    if index.is_file():
        return [directory / name for name in _shards(index)]
    files = sorted(directory.glob("*.safetensors"))
    if files:
        return files
    raise no_safetensors(directory)


def _shards(index: Path) -> list[str]:
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is not a weight index ({error})") from None
    for name in names:
        if not isinstance(name, str) or "/" in name or "\\" in name or name.startswith("."):
            raise ModelError(f"{index} names {name!r}, which is not a file beside it")
    return sorted(names)


def check_safetensors(path: Path) -> None:
    """Raise ModelError unless the file is as long as its header says."""
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size_bytes < 8 or length > min(size_bytes - 8, _MAX_HEADER_BYTES):
                raise ModelError(f"{path} is cut short or not a safetensors file")
            header = json.loads(file.read(length))
    except OSError as error:
        raise ModelError(f"{path} can't be read ({error.strerror or error})") from None
    except (ValueError, RecursionError):
        raise ModelError(f"{path} has a broken safetensors header") from None
    expected_bytes = 8 + length + _data_bytes(path, header)
    if size_bytes != expected_bytes:
        raise ModelError(
            f"{path} has {size_bytes} bytes, its header says {expected_bytes}: fetch it again"
        )


def _data_bytes(path: Path, header: object) -> int:
    try:
        if not isinstance(header, dict):
            raise TypeError
        return max(
            (int(entry["data_offsets"][1]) for k, entry in header.items() if k != "__metadata__"),
            default=0,
        )
    except (TypeError, KeyError, ValueError, IndexError):
        raise ModelError(f"{path} has a broken safetensors header") from None
