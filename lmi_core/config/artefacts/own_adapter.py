"""A model that is a LoRA adapter alone: its files name the base model that it is served with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lmi_core.adapters.adapter_config import FILE_NAME, read_adapter_config
from lmi_core.config.artefacts.model_source import ModelSource, locate
from lmi_core.config.paths import is_file
from lmi_core.config.problem import Problems
from lmi_core.errors import ModelError
from lmi_core.files import read_json_object

_BASE = "base_model_name_or_path"


@dataclass(frozen=True, slots=True)
class OwnAdapter:
    """Where the adapter and its base model are."""

    source: ModelSource
    base: ModelSource
    rank: int
    """The largest of its modules'."""

    @property
    def name(self) -> str:
        return Path(self.source.location).name


def find_own_adapter(
    source: ModelSource, directory: Path | None, problems: Problems
) -> OwnAdapter | None:
    """What ``directory``, where the files of ``source`` are, says of its base; None: it holds a
    model, or isn't here. Faults go to ``problems``."""
    if directory is None or is_file(directory / "config.json"):
        return None
    path = directory / FILE_NAME
    if not is_file(path):
        return None
    try:
        values, config = read_json_object(path), read_adapter_config(directory)
    except ModelError as error:
        problems.error(str(path), str(error).removeprefix(f"{path}: "))
        return None
    named, revision = values.get(_BASE), values.get("revision")
    base = None
    if isinstance(named, str) and named:
        base = locate(named, str(revision) if revision else None, directory.parent, Path())
    if base is None:
        problems.error(
            str(path),
            f"the model is a LoRA adapter, and its base model, {_BASE}={str(named)[:200]!r}, is "
            "neither a directory here nor a hub id; name the base model in option.model_id, and "
            "this directory in option.lora_adapters",
            "option.model_id",
        )
        return None
    return OwnAdapter(source, base, max((config.rank, *config.ranks.values())))
