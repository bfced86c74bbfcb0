"""Where a model's directory keeps its chat templates, and the special tokens that they write."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmi_core.errors import ModelError
from lmi_core.files import read_text

_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def template_files(directory: Path) -> dict[str, Path]:
    named = sorted((directory / "additional_chat_templates").glob("*.jinja"))
    files = {path.stem: path for path in named}
    main = directory / "chat_template.jinja"
    if main.exists():
        files["default"] = main
    return files


def given_template(template: str, directory: Path) -> str:
    """Jinja text, or that of a file beside the model or elsewhere."""
    if "{" in template:
        return template
    for path in (directory / template, Path(template)):
        if path.is_file():
            return read_text(path)
    raise ModelError(
        f"option.chat_template={template[:200]} is neither a file nor Jinja text",
        field="option.chat_template",
    )


def configured_templates(value: object, path: Path) -> dict[str, str]:
    """``chat_template`` is one template, or a list of named ones."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    try:
        templates = {entry["name"]: entry["template"] for entry in value}  # type: ignore[attr-defined]
    except (TypeError, KeyError):
        templates = {"": None}
    if not all(isinstance(text, str) for pair in templates.items() for text in pair):
        raise ModelError(
            f"{path}: chat_template must be a text or a list of objects with the texts name and "
            f"template, got {str(value)[:80]}",
            field="chat_template",
        )
    return templates


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _TOKEN_NAMES:
        value = config.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens
