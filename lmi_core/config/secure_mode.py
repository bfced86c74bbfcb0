"""SageMaker's secure mode: what the platform forbids models to bring along.

The variables and controls are those of DJL-Serving's secure-mode plugin (SecureModeUtils.java). Its
list of allowed keys isn't kept here: every key is explained, and ``--strict`` refuses unknown ones.
Of what it doesn't list, chat templates and what runs code fall under the controls.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from lmi_core.config.model_config import ModelConfig
from lmi_core.errors import UserError
from lmi_core.files import read_json

MODE, CONTROLS = "SAGEMAKER_SECURE_MODE", "SAGEMAKER_SECURITY_CONTROLS"
CHANNELS = "SAGEMAKER_UNTRUSTED_CHANNELS"
_REMOTE_CODE = "DISALLOW_TRUST_REMOTE_CODE"
_SCRIPTS = "DISALLOW_CUSTOM_INFERENCE_SCRIPTS"
_TEMPLATE = "DISALLOW_CHAT_TEMPLATE"
_TEMPLATES = ("option.chat_template", "option.tokenizer_config_path")
_PICKLED = re.compile(r".*\.(bin|pt|pth|ckpt|pkl)", re.IGNORECASE)


def _has_template(path: Path) -> bool:
    if path.name == "tokenizer_config.json":
        return "chat_template" in read_json(path)
    return path.suffix == ".jinja" or path.name == "chat_template.json"


_FILES: dict[str, Callable[[Path], bool]] = {
    "DISALLOW_REQUIREMENTS_TXT": lambda path: path.name == "requirements.txt",
    "DISALLOW_PICKLE_FILES": lambda path: _PICKLED.fullmatch(path.name) is not None,
    _SCRIPTS: lambda path: path.name == "model.py",
    _TEMPLATE: _has_template,
}
_CONTROLS = (*_FILES, _REMOTE_CODE)
_INTERPRETERS = ("python", "python3", "/usr/bin/python3", "/opt/djl/vllm_venv/bin/python")
"""Names, and those of the plugin's list."""


def check_secure(
    model: ModelConfig, directories: Iterable[Path], environ: Mapping[str, str]
) -> None:
    """Raise UserError for what ``SAGEMAKER_SECURITY_CONTROLS`` forbid, in the model's
    configuration, or in its ``directories`` and ``SAGEMAKER_UNTRUSTED_CHANNELS`` (paths)."""
    if controls := _in_force(environ):
        _check_keys(model, controls)
        _check_files(directories, environ, controls)


def check_files(directories: Iterable[Path], environ: Mapping[str, str]) -> None:
    """The same of directories alone, as of an adapter's."""
    if controls := _in_force(environ):
        _check_files(directories, environ, controls)


def _check_files(
    directories: Iterable[Path], environ: Mapping[str, str], controls: Iterable[str]
) -> None:
    channels = [Path(path) for path in _listed(environ, CHANNELS)]
    for channel in channels:
        if not channel.is_dir():
            raise UserError(f"{channel} ({CHANNELS}) isn't a directory", field=CHANNELS)
    for path in _files([*directories, *channels]):
        for name in controls:
            if name in _FILES and _FILES[name](path):
                raise UserError(f"{path} is forbidden by {name} ({CONTROLS}): leave it out")


def _files(roots: Iterable[Path]) -> Iterator[Path]:
    """All files in directories, those that links lead to included; none twice by links in a
    circle."""
    seen: set[str] = set()
    for root in roots:
        for place, names, files in os.walk(root, followlinks=True):
            names[:] = [name for name in sorted(names) if _is_new(os.path.join(place, name), seen)]
            yield from (path for name in sorted(files) if (path := Path(place, name)).is_file())


def _is_new(directory: str, seen: set[str]) -> bool:
    real = os.path.realpath(directory)
    is_new = real not in seen
    seen.add(real)
    return is_new


def _in_force(environ: Mapping[str, str]) -> list[str]:
    """The controls; none outside of secure mode."""
    if environ.get(MODE, "").strip().lower() != "true":
        return []
    controls = _listed(environ, CONTROLS)
    if not controls:
        raise UserError(f"{MODE} is true, and {CONTROLS} names no control", field=CONTROLS)
    for name in controls:
        if name not in _CONTROLS:
            raise UserError(
                f"{name!r} isn't a control of secure mode; allowed: {', '.join(_CONTROLS)}",
                field=CONTROLS,
            )
    return controls


def _check_keys(model: ModelConfig, controls: Iterable[str]) -> None:
    entry = str(model.get("option.entryPoint") or "djl_python.")
    python = model.get("option.pythonExecutable")
    forbidden = (
        (_REMOTE_CODE, "option.trust_remote_code", model.trust_remote_code),
        (_SCRIPTS, "option.entryPoint", not entry.startswith("djl_python.")),
        (_SCRIPTS, "option.pythonExecutable", python not in (None, *_INTERPRETERS)),
        *((_TEMPLATE, key, model.get(key) is not None) for key in _TEMPLATES),
    )
    for name, key, is_given in forbidden:
        if name in controls and is_given:
            raise UserError(f"{key} is forbidden by {name} ({CONTROLS}): leave it out", field=key)


def _listed(environ: Mapping[str, str], variable: str) -> list[str]:
    return [name for each in environ.get(variable, "").split(",") if (name := each.strip())]
