"""What a model's own serving.properties may name: files of the model, and nothing else of the host.

The file may have come with the model. What lies outside the model's directories, and what the
server keeps for itself, is for the operator to say: by flags, variables or config.properties.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from lmi_core.config.sources.merge import Value, Values
from lmi_core.config.sources.models import Listed
from lmi_core.config.targets.handler_environment import KEY as _HANDLER_ENVIRONMENT
from lmi_core.config.targets.speculation_settings import draft_place

_TEMPLATE = "option.chat_template"
_MODEL_ID = "option.model_id"
_SPECULATIVE_CONFIG = "option.speculative_config"
_PATHS = (
    _TEMPLATE,
    _MODEL_ID,
    "option.entryPoint",
    "option.lora_adapters",
    "option.draft_model_id",
    "option.speculative_draft_model",
    _SPECULATIVE_CONFIG,
    "option.tokenizer",
    "option.tokenizer_config_path",
)


def refuse_others_files(values: Values, listed: Listed, files: Path | None) -> None:
    """Refuse the values by which a model's own file reaches beyond the model.

    ``files``: the directory of its weights, where they are here. In a directory that the operator
    named, ``option.model_id`` is as good as the operator's own.
    """
    for value in values.known.values():
        key = value.option.key
        if not value.setting.is_of_model or (key == _MODEL_ID and not listed.is_downloaded):
            continue
        directories = (listed.directory, None if key == _MODEL_ID else files)
        outside = [text for text in _paths(value) if _leaves(text, directories)]
        if outside:
            values.refused[key] = _refusal(
                f"{outside[0][:200]!r} is outside the model's directory", value.option.variable
            )
        elif key == _HANDLER_ENVIRONMENT:
            values.refused[key] = _refusal("it is about the server", value.option.variable)


def _paths(value: Value) -> Sequence[str]:
    """The paths in a value, hub ids and other URLs among them."""
    if value.option.key not in _PATHS:
        return ()
    if isinstance(value.value, tuple):  # name=place@revision
        return [str(item).rpartition("=")[2] for item in value.value]
    text = str(value.value)
    if value.option.key == _SPECULATIVE_CONFIG:
        place = draft_place(json.loads(text))
        return () if place is None else (place,)
    return () if value.option.key == _TEMPLATE and "{" in text else (text,)


def _leaves(text: str, directories: Sequence[Path | None]) -> bool:
    """Whether a path is in none of the directories, wherever links in them lead."""
    if "://" in text:
        return False
    homes = [os.path.abspath(directory) for directory in directories if directory is not None]
    return not any(
        Path(os.path.normpath(os.path.join(home, text))).is_relative_to(other)
        for home in homes
        for other in homes
    )


def _refusal(why: str, variable: str) -> str:
    return (
        f"{why}; the model's own file may have come with it and can't say that: write {variable}, "
        "a flag, or config.properties"
    )
