"""Adapters that lie beside a model: one directory each, in its folder ``adapters``."""

from __future__ import annotations

from pathlib import Path

from lmi_core.config.paths import is_dir, is_file
from lmi_core.errors import ModelError

FOLDER = "adapters"


def adapters_beside(*models: Path | None, folder: str = FOLDER) -> list[tuple[str, Path]]:
    """Names and directories, in order, of the adapters in ``folder`` of the models' directories,
    each of which counts once; None is a directory that there isn't."""
    folders = [model / folder for model in models if model is not None]
    distinct = {folder.resolve(): folder for folder in reversed(folders) if is_dir(folder)}
    return [
        (path.name, path)
        for folder in reversed(distinct.values())
        for path in sorted(folder.iterdir())
        if path.is_dir() and not path.name.startswith(".")
    ]


def check_adapter_code(path: Path) -> None:
    """Raise ModelError for an adapter with formatters of its own, which nobody here runs."""
    code = path / "model.py"
    if is_file(code):
        raise ModelError(
            f"{code}: an adapter's own formatters are not available in this version; remove the "
            "file, or put it beside the model's serving.properties for all requests",
            field="adapter",
        )
