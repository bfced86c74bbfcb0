"""Which of a checkpoint's layers compressed-tensors quantised how: ``config_groups``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmi_core.weights.hf_config import QuantizationSettings
from lmi_core.weights.quantized.kept_codes import NUM_BITS

PACKED, PLAIN = "pack-quantized", "int-quantized"
"""Formats in integers: codes in words, or int8 as it is."""
_STRATEGIES = ("group", "channel", "tensor")
_KEEPING_ORDER = (None, False, "weight", "static")
_CHANGING_ORDER = (True, "group", "dynamic")
_ANY_LINEAR = "Linear"
_REGEX = "re:"


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """How the weights of some layers are quantised."""

    targets: tuple[str, ...]
    format: str
    num_bits: int
    group_size: int | None
    """Inputs per scale; None: a scale per output, or one."""
    is_per_tensor: bool
    is_symmetric: bool
    is_ordered: bool
    """Neighbouring inputs share groups."""
    has_int8_rows: bool
    """Inputs are rounded to int8, too."""

    def targets_layer(self, name: str) -> bool:
        """Whether a target names the layer itself, rather than every one."""
        return any(_matches(target, name) for target in self.targets)


def read_schemes(settings: QuantizationSettings) -> tuple[WeightScheme, ...]:
    """But for those of fp8, which tensors themselves tell. Raises ModelError for what can't be
    read."""
    groups = settings.values.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise settings.error("config_groups", "is missing: it says how weights are quantised")
    integers = {name: group for name, group in groups.items() if not _is_fp8(group)}
    return tuple(_scheme(settings, name, group) for name, group in (integers or groups).items())


def _is_fp8(group: Any) -> bool:
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        return False
    return weights.get("type") == "float" and weights.get("num_bits") == 8


def scheme_of(schemes: Sequence[WeightScheme], name: str) -> WeightScheme:
    """Of the layer ``name``: one that targets it, else one that targets every layer."""
    own = (scheme for scheme in schemes if scheme.targets_layer(name))
    others = (scheme for scheme in schemes if _ANY_LINEAR in scheme.targets)
    return next(own, None) or next(others, schemes[0])


def _matches(target: str, name: str) -> bool:
    if target.startswith(_REGEX):
        return re.match(target.removeprefix(_REGEX), name) is not None
    return target == name or name.endswith(f".{target}")


def _scheme(settings: QuantizationSettings, name: str, group: Any) -> WeightScheme:
    where = f"config_groups.{name}"
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise settings.error(where, "has no object weights")
    values = QuantizationSettings(
        settings.path, weights, prefix=f"{settings.prefix}{where}.weights."
    )
    if (kind := values.string("type", "int")) != "int":
        raise values.error("type", f"is {kind!r}; beside int weights only int can be read")
    num_bits = values.integer("num_bits", 8)
    if num_bits not in NUM_BITS:
        raise values.error("num_bits", f"is {num_bits}; 4 and 8 can be read")
    strategy = weights.get("strategy") or _default_strategy(weights.get("group_size"))
    if strategy not in _STRATEGIES:
        known = ", ".join(_STRATEGIES)
        raise values.error("strategy", f"is {strategy!r}; {known} can be read")
    order = weights.get("actorder")
    if order not in (*_KEEPING_ORDER, *_CHANGING_ORDER):
        known = ", ".join(str(each) for each in (*_KEEPING_ORDER, *_CHANGING_ORDER))
        raise values.error("actorder", f"is {str(order)[:80]!r}; {known} can be read")
    return WeightScheme(
        targets=_targets(settings, where, group),
        format=_format(settings, group),
        num_bits=num_bits,
        group_size=values.group_size if strategy == "group" else None,
        is_per_tensor=strategy == "tensor",
        is_symmetric=values.boolean("symmetric", True),
        is_ordered=order not in _CHANGING_ORDER,
        has_int8_rows=_has_int8_rows(group.get("input_activations")),
    )


def _has_int8_rows(inputs: Any) -> bool:
    """Whether such inputs have 8 bits and a scale per row, or one for all: a row's is as good."""
    if not isinstance(inputs, dict) or inputs.get("type", "int") != "int":
        return False
    strategy = inputs.get("strategy") or "tensor"
    return inputs.get("num_bits", 8) == 8 and strategy in ("token", "tensor")


def _default_strategy(group_size: object) -> str:
    return "tensor" if group_size is None else "channel" if group_size == -1 else "group"


def _format(settings: QuantizationSettings, group: dict[str, Any]) -> str:
    own = group.get("format") or settings.values.get("format")
    if own not in (PACKED, PLAIN):
        raise settings.error(
            "format", f"is {str(own)[:80]!r}; in integers {PACKED} and {PLAIN} can be read"
        )
    return str(own)


def _targets(settings: QuantizationSettings, where: str, group: dict[str, Any]) -> tuple[str, ...]:
    targets = group.get("targets") or [_ANY_LINEAR]
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise settings.error(f"{where}.targets", f"is {str(targets)[:80]}, but must list names")
    for target in targets:
        try:
            _matches(target, "")
        except re.error as error:
            raise settings.error(f"{where}.targets", f"has {target[:80]!r}: {error}") from None
    return tuple(targets)
