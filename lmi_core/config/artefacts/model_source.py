"""Where a model's files are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lmi_core.config.paths import is_dir
from lmi_core.config.problem import Problems
from lmi_core.config.sources.merge import Values
from lmi_core.config.sources.models import HUB_NAME, Listed
from lmi_core.weights.gguf.directory import is_gguf


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where the model's files are: a directory, a hub id (with revision) or an S3 prefix."""

    kind: Literal["local", "hub", "s3", "none"]
    location: str
    revision: str | None = None
    file: str = ""
    """Of a hub id, the GGUF file that is meant, or a part of its name."""


def find_source(values: Values, listed: Listed, problems: Problems) -> ModelSource:
    """Say where the model's files are; ``option.model_id`` wins over the model's directory."""
    model_id = values.get("option.model_id")
    revision = values.get("option.revision")
    if model_id is None:
        directory = listed.directory or values.get("option.model_dir")
        if directory is None:
            problems.error(listed.entry.where, f"model {listed.entry.name} has no option.model_id")
            return ModelSource("none", "")
        return ModelSource("local", str(directory))
    text = str(model_id)
    here = None if listed.is_downloaded and _is_own(values) else Path()
    source = locate(text, str(revision) if revision else None, here, listed.directory)
    if source is not None:
        return source
    problems.error(
        values.where("option.model_id"),
        f"option.model_id={text[:200]!r} is neither a directory, a GGUF file, a hub id, nor an "
        "s3:// prefix",
        "option.model_id",
    )
    return ModelSource("none", text)


def _is_own(values: Values) -> bool:
    return values.known["option.model_id"].setting.is_of_model


def locate(text: str, revision: str | None, *within: Path | None) -> ModelSource | None:
    """Return what ``text`` names: an s3:// prefix, a directory or GGUF file, relative to one of
    ``within`` where it isn't absolute, or a hub id; None if it is none of them."""
    if text.startswith("s3://"):
        return ModelSource("s3", text)
    for directory in within:
        if directory is not None and (is_dir(directory / text) or is_gguf(directory / text)):
            return ModelSource("local", str(directory / text))
    if match := HUB_NAME.fullmatch(text):
        return ModelSource("hub", match["id"], revision, match["file"] or "")
    return None
