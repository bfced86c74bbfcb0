"""A configuration's values turned into that of a model's custom code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from lmi_core.config.artefacts.handler import Handler
from lmi_core.config.problem import Problems
from lmi_core.config.sources.merge import Values
from lmi_core.config.table.effect import show
from lmi_core.config.targets.host import Host
from lmi_core.settings.custom_code_config import CustomCodeConfig

_FIELDS = frozenset(field.name for field in fields(CustomCodeConfig))
_PREFIX = "option."
_ENV = "option.env"


def custom_code_settings(
    handler: Handler,
    values: Values,
    directory: Path,
    host: Host,
    problems: Problems,
    *,
    name: str,
    withheld: tuple[str, ...],
) -> CustomCodeConfig:
    """The configuration of the ``handler`` of the model ``name`` in ``directory``, which doesn't
    inherit the variables ``withheld``."""
    settings: dict[str, Any] = {}
    for value in values.used():
        action = value.option.actions.get("handler")
        if action is not None and action.setting in _FIELDS:
            settings.setdefault(action.setting, value.value)
    _set_workers(settings, values, host)
    if settings.get("python") in ("python", "python3"):
        del settings["python"]
    settings["env"] = _env(values, problems)
    settings["path"] = handler.path
    settings["function"] = handler.handle
    settings["input_formatter"] = None if handler.handle else handler.input_formatter
    settings["output_formatter"] = None if handler.handle else handler.output_formatter
    settings["model_dir"] = directory
    settings["properties"] = _properties(values)
    settings["call_properties"] = _call_properties(values, directory, host)
    settings |= {"model_name": name, "withheld": withheld}
    return CustomCodeConfig(**settings)


def _set_workers(settings: dict[str, Any], values: Values, host: Host) -> None:
    """Those of the device's kind are stronger; there is a worker at least."""
    kind = "gpu" if host.num_gpus else "cpu"
    counts = []
    for key in ("minWorkers", "maxWorkers"):
        given = values.get(f"{kind}.{key}")
        given = values.get(key) if given is None else given
        counts.append(given if isinstance(given, int) else 1)
    settings["min_workers"] = max(1, counts[0])
    settings["max_workers"] = max(settings["min_workers"], counts[1])


def _env(values: Values, problems: Problems) -> dict[str, str]:
    given = values.get(_ENV)
    env = {}
    for item in given if isinstance(given, tuple) else ():
        name, separator, text = str(item).partition("=")
        if not separator or not name.strip() or "\0" in text:
            problems.error(
                values.where(_ENV), f"{_ENV}: {str(item)[:80]!r} is not NAME=value", _ENV
            )
        else:
            env[name.strip()] = text
    return env


def _properties(values: Values) -> Mapping[str, str]:
    """Every ``option.`` key without its prefix, known or not, as text."""
    properties = {
        setting.key.removeprefix(_PREFIX): setting.text
        for setting in values.unknown.values()
        if setting.key.startswith(_PREFIX)
    }
    for key, value in values.known.items():
        if key.startswith(_PREFIX) and not value.option.secret:
            properties[key.removeprefix(_PREFIX)] = show_whole(value.value)
    return properties


def show_whole(value: object) -> str:
    """Write a value as ``show`` does, of any length."""
    return value if isinstance(value, str) else show(value)


def _call_properties(values: Values, directory: Path, host: Host) -> Mapping[str, str]:
    properties = {
        "model_dir": str(directory.absolute()),
        "device_id": "0" if host.num_gpus else "-1",
    }
    degree = values.get("option.tensor_parallel_degree")
    if degree is not None:
        properties["tensor_parallel_degree"] = (
            str(max(1, host.num_devices)) if degree == "max" else str(degree)
        )
    return properties
