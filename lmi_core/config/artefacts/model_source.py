"""Where a model's files are."""

from __future__ import annotations

from pathlib import Path

from lmi_core.config.model_config import ModelSource
from lmi_core.config.paths import is_dir
from lmi_core.config.problem import Problems
from lmi_core.config.sources.merge import Values
from lmi_core.config.sources.models import HUB_ID, Listed


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
    source = locate(text, str(revision) if revision else None, listed.directory)
    if source is not None:
        return source
    problems.error(
        values.where("option.model_id"),
        f"option.model_id={text[:200]!r} is neither a directory, a hub id, nor an s3:// prefix",
        "option.model_id",
    )
    return ModelSource("none", text)


def locate(text: str, revision: str | None, directory: Path | None) -> ModelSource | None:
    """Return what ``text`` names: an s3:// prefix, a directory, also within ``directory``, or a hub
    id; None if it is none of them."""
    if text.startswith("s3://"):
        return ModelSource("s3", text)
    for candidate in (Path(text), *(() if directory is None else (directory / text,))):
        if is_dir(candidate):
            return ModelSource("local", str(candidate))
    if HUB_ID.fullmatch(text):
        return ModelSource("hub", text, revision)
    return None
