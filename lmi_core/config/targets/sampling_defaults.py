"""What requests on OpenAI's routes that leave a parameter open get, by the model's files."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from lmi_core.config.model_config import ModelConfig
from lmi_core.config.table import BY_KEY
from lmi_core.errors import ModelError, UserError
from lmi_core.json_file import read_json_object

KEY = "option.generation_config"
FILE = "generation_config.json"
_FIELDS: Mapping[str, tuple[str, type, float, float]] = {
    "temperature": ("temperature", float, 0.0, 2.0),
    "top_p": ("top_p", float, sys.float_info.min, 1.0),
    "top_k": ("top_k", int, -1, 2**31 - 1),
    "min_p": ("min_p", float, 0.0, 1.0),
    "repetition_penalty": ("repetition_penalty", float, 0.001, 100.0),
    "max_new_tokens": ("max_tokens", int, 1, 2**31 - 1),
}
"""What is read of the file, as vLLM does: the request's field, its type, the least and the most."""


def sampling_defaults(model: ModelConfig, directory: Path) -> dict[str, float]:
    """By the fields of requests; ``directory`` has the model's files.

    Raises ModelError for a file that can't be read or has a value that no request may have,
    UserError for a directory without one that was named.
    """
    where = model.get(KEY) or BY_KEY[KEY].default_for(model.system)
    if where == "vllm":
        return {}
    path = (directory if where == "auto" else Path(str(where))) / FILE
    if not path.exists():
        if where == "auto":
            return {}
        raise UserError(
            f"generation_config is {where}, but {path} isn't there: write auto, vllm or a "
            f"directory with {FILE}",
            field=KEY,
        )
    values = read_json_object(path)
    found = {}
    for name, (field, kind, least, most) in _FIELDS.items():
        if (value := values.get(name)) is None:
            continue
        is_number = isinstance(value, kind | int) and not isinstance(value, bool)
        if not is_number or not least <= value <= most:
            what = "a whole number" if kind is int else "a number"
            raise ModelError(
                f"{path}: {name} is {value!r}, but must be {what} from {least:g} to {most:g}; "
                "option.generation_config=vllm leaves the file out",
                field=KEY,
            )
        found[field] = value
    return found


def sampling_note(model: ModelConfig, directory: Path) -> tuple[str, ...]:
    """The same in words."""
    found = sampling_defaults(model, directory)
    if not found:
        return ()
    values = ", ".join(f"{field} {value}" for field, value in found.items())
    return (
        f"requests on OpenAI's routes that don't say it get {values}, by {FILE}; "
        "option.generation_config=vllm leaves it out",
    )
