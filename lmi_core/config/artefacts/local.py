"""Checks of directories before anything is loaded from them: by the loader's own rules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lmi_core.config.paths import is_file
from lmi_core.errors import ModelError
from lmi_core.files import check_readable, read_json_object
from lmi_core.weights.checkpoint import read_checkpoint
from lmi_core.weights.hf_config import check_directory

_OPENED = (".json", ".txt", ".model", ".jinja", ".py")
"""What files are called that libraries open by themselves."""
Check = Callable[[Path], None]
"""Raises ModelError, naming the file, for a directory whose files can't be loaded."""


def check_model(directory: Path) -> None:
    """Raise ModelError, naming the file, unless ``directory`` holds a whole model.

    Reads the headers of the weight files, whose sizes and tensors must agree, and no weights.
    """
    check_directory(directory)
    read_json_object(directory / "config.json")
    for path in sorted(directory.iterdir()):
        if path.suffix in _OPENED and path.exists() and not path.is_dir():
            check_readable(path)
    read_checkpoint(directory)


def check_adapter(directory: Path) -> None:
    """Raise ModelError unless ``directory`` has the files of a PEFT adapter; what is in them is
    checked against the model that it is for."""
    has_weights = any(directory.glob("*.safetensors")) or is_file(directory / "adapter_model.bin")
    if not has_weights or not is_file(directory / "adapter_config.json"):
        raise ModelError(
            f"{directory} is no LoRA adapter: it needs adapter_config.json and "
            "adapter_model.safetensors",
            field="option.lora_adapters",
        )
