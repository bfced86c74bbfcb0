"""Check of a model directory before anything is loaded from it: by the loader's own rules."""

from __future__ import annotations

from pathlib import Path

from lmi_core.models.checkpoint import read_checkpoint
from lmi_core.models.hf_config import check_directory, read_json_object


def check_model(directory: Path) -> None:
    """Raise ModelError, naming the file, unless ``directory`` holds a whole model.

    Reads the headers of the weight files, whose sizes and tensors must agree, and no weights.
    """
    check_directory(directory)
    read_json_object(directory / "config.json")
    read_checkpoint(directory)
