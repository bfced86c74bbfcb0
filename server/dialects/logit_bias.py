"""Biases of tokens as JSON has them: an object of token ids, which are strings there."""

from __future__ import annotations

from collections.abc import Mapping

from lmi_core.errors import UserError

_MAX_NAMED = 16
"""Of the keys at fault, so many are named."""


def logit_bias(biases: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    """Pairs of a token id and a bias; UserError names the keys that are none."""
    wrong = [
        repr(name[:40])
        for name in biases
        if not (name.isascii() and name.isdecimal()) or len(name) > 10
    ]
    if wrong:
        more = f" and {len(wrong) - _MAX_NAMED} more" if len(wrong) > _MAX_NAMED else ""
        raise UserError(
            f"logit_bias has the keys {', '.join(wrong[:_MAX_NAMED])}{more}; keys are token ids",
            field="logit_bias",
        )
    return tuple((int(name), bias) for name, bias in biases.items())
