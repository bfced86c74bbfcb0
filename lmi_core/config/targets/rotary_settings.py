"""Rotary settings in the form of config.json, in place of the model's own, as vLLM takes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lmi_core.config.sources.merge import Value, Values

_SCALING, _OVERRIDES = ROTARY_KEYS = ("option.rope_scaling", "option.hf_overrides")
"""Whose values may be JSON of it."""
_REPLACED = ("rope_parameters", "rope_scaling", "rope_theta")
"""Keys of config.json that may be replaced."""


def rotary_fields(value: Value) -> dict[str, object]:
    """What the value of one of ``ROTARY_KEYS`` sets of the engine's configuration; what has a key
    of its own beside its object, too, so that keys that disagree are found."""
    text = str(value.value)
    if value.option.key == _OVERRIDES:
        replaced = _of_text(text)
    elif text.lstrip().startswith("{"):
        replaced = {"rope_scaling": json.loads(text)}
    else:
        return {"rope_scaling": text}
    fields: dict[str, object] = {"rope_theta": replaced.get("rope_theta")}
    for name in _REPLACED[:2]:
        if name in replaced:
            fields["rope_scaling"] = scaling = replaced[name] or {"rope_type": "default"}
            if isinstance(scaling, dict):
                fields["rope_factor"] = scaling.get("factor")
                fields["rope_theta"] = scaling.get("rope_theta", fields["rope_theta"])
    return {name: given for name, given in fields.items() if given is not None}


def refuse_overrides(values: Values) -> None:
    """Note rotary settings that no model has, and what else of config.json is to be replaced."""
    for key in ROTARY_KEYS:
        value = values.known.get(key)
        if value is None or key in values.ignored:
            continue
        problem = None
        scaling = rotary_fields(value).get("rope_scaling")
        if isinstance(scaling, Mapping):
            from lmi_core.models.rope import objection_to

            problem = objection_to(scaling)
        elif scaling is not None and key == _OVERRIDES:
            problem = "rope_parameters must be an object"
        others = () if key == _SCALING else _of_text(str(value.value)).keys() - {*_REPLACED}
        if others:
            problem = (
                f"of config.json, {', '.join(_REPLACED)} can be replaced here; write "
                f"{', '.join(sorted(others))} into the model's own"
            )
        if problem is not None:
            values.refused[key] = problem


def _of_text(text: str) -> dict[str, Any]:
    """Overrides of a configuration's top and of its text's part alike."""
    overrides = json.loads(text)
    inner = overrides.pop("text_config", {})
    return {**overrides, **(inner if isinstance(inner, dict) else {"text_config": inner})}
