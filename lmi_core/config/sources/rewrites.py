"""Deprecated keys turned into the ones that replace them."""

from __future__ import annotations

from dataclasses import replace

from lmi_core.config.problem import Problems
from lmi_core.config.sources.merge import Value, Values
from lmi_core.config.table import BY_KEY

_QUANTIZE = "option.quantize"


def rewrite(values: Values, problems: Problems) -> None:
    """Apply replacements in place and warn about every deprecated key that was given."""
    for key, value in list(values.known.items()):
        option = value.option
        if option.deprecated:
            hint = f"; write {option.replaced_by}" if option.replaced_by else ""
            problems.warn(
                value.setting.where, f"{key} is deprecated {option.deprecated}{hint}", key
            )
    for old in ("option.s3url", "option.data_type"):
        _move(values, old)
    _load_in_bits(values)


def _move(values: Values, old: str) -> None:
    value = values.known.get(old)
    new = value.option.replaced_by if value else None
    if value and new and new not in values.known:
        values.known[new] = replace(
            value, option=BY_KEY[new], setting=replace(value.setting, key=new)
        )


def _load_in_bits(values: Values) -> None:
    """4 bits win over 8 bits, and both over ``quantize``, as in the reference."""
    for old, quantize in (
        ("option.load_in_8bit", "bitsandbytes8"),
        ("option.load_in_4bit", "bitsandbytes4"),
    ):
        value = values.known.get(old)
        if value is not None and value.value is True:
            setting = replace(value.setting, key=_QUANTIZE, text=quantize)
            values.known[_QUANTIZE] = Value(BY_KEY[_QUANTIZE], quantize, setting)
