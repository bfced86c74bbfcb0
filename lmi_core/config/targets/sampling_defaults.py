"""What requests on OpenAI's routes that leave a parameter open get, by the model's files."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from lmi_core.config.model_config import ModelConfig
from lmi_core.config.table import BY_KEY
from lmi_core.errors import ModelError, UserError
from lmi_core.files import read_json_object

KEY = "option.generation_config"
OVERRIDE = "option.override_generation_config"
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
    UserError for a directory without one that was named, and for such an object of the options.
    """
    path = _file(model, directory)
    found = {}
    if path is not None:
        way_out = "; option.generation_config=vllm leaves the file out"
        found = _checked(read_json_object(path), f"{path}: ", way_out, KEY)
    written = model.get(OVERRIDE)
    values = {} if written is None else json.loads(str(written))
    if unknown := sorted(values.keys() - _FIELDS.keys()):
        raise UserError(
            f"{OVERRIDE} has {unknown[0][:40]!r}; allowed are {', '.join(_FIELDS)}", field=OVERRIDE
        )
    return found | _checked(values, f"{OVERRIDE}: ", "", OVERRIDE)


def _file(model: ModelConfig, directory: Path) -> Path | None:
    """Where values are read; None: nowhere."""
    where = model.get(KEY) or BY_KEY[KEY].default_for(model.system)
    if where == "vllm":
        return None
    path = (directory if where == "auto" else Path(str(where))) / FILE
    if path.exists():
        return path
    if where == "auto":
        return None
    raise UserError(
        f"generation_config is {where}, but {path} isn't there: write auto, vllm or a "
        f"directory with {FILE}",
        field=KEY,
    )


def _checked(values: Mapping[str, object], where: str, way_out: str, key: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, (field, kind, least, most) in _FIELDS.items():
        if (value := values.get(name)) is None:
            continue
        is_number = isinstance(value, kind | int) and not isinstance(value, bool)
        if not is_number or not least <= value <= most:  # type: ignore[operator]
            what = "a whole number" if kind is int else "a number"
            raise ModelError(
                f"{where}{name} is {value!r}, but must be {what} from {least:g} to {most:g}"
                f"{way_out}",
                field=key,
            )
        found[field] = value  # type: ignore[assignment]
    return found


def sampling_note(model: ModelConfig, directory: Path) -> tuple[str, ...]:
    """The same in words, where a file says some of it."""
    found = sampling_defaults(model, directory)
    if not found or _file(model, directory) is None:
        return ()
    values = ", ".join(f"{field} {value}" for field, value in found.items())
    by = FILE if model.get(OVERRIDE) is None else f"{OVERRIDE} and {FILE}"
    return (
        f"requests on OpenAI's routes that don't say it get {values}, by {by}; "
        "option.generation_config=vllm leaves the file out",
    )
