"""What values of a request's parameters may be, and what is said of those that aren't."""

from __future__ import annotations

import math

from lmi_core.errors import UserError

_MAX_NAMED = 16
"""Of the token ids at fault, so many are named."""


def check_int(name: str, value: int | None, low: int, high: int | None, note: str = "") -> None:
    if value is None:
        return
    if type(value) is not int:
        raise wrong_type(name, value, f"{name} must be an int")
    if value >= low and (high is None or value <= high):
        return
    allowed = f"at least {low}" if high is None else f"between {low} and {high}"
    raise UserError(f"{name} must be {allowed}, got {value}{note}", field=name)


def check_float(
    name: str, value: float, low: float, high: float, *, open_low: bool = False, what: str = ""
) -> None:
    """``what``: of the field is checked, where that isn't all of it."""
    what = what or name
    if type(value) is not float and type(value) is not int:
        raise wrong_type(name, value, f"{what} must be a number")
    in_range = (value > low if open_low else value >= low) and value <= high
    if in_range and math.isfinite(value):
        return
    allowed = f"above {low:g} and at most {high:g}" if open_low else f"between {low:g} and {high:g}"
    raise UserError(f"{what} must be {allowed}, got {number(value)}", field=name)


def check_ids(name: str, ids: tuple[int, ...], vocab_size: int) -> None:
    if len(ids) > vocab_size:
        raise UserError(f"{name} has {len(ids)} token ids; the model has {vocab_size}", field=name)
    for token_id in ids:
        if type(token_id) is not int:
            raise wrong_type(name, token_id, f"{name} must hold token ids")
    wrong = [token_id for token_id in ids if not 0 <= token_id < vocab_size]
    if wrong:
        more = f" and {len(wrong) - _MAX_NAMED} more" if len(wrong) > _MAX_NAMED else ""
        raise UserError(
            f"token_id(s) {wrong[:_MAX_NAMED]}{more} in {name} are out of vocabulary; allowed are "
            f"0 to {vocab_size - 1}. Vocabulary size: {vocab_size}",
            field=name,
        )


def number(value: float) -> str:
    """As it is said; an int may have no float that is as large."""
    return f"{value:g}" if abs(value) < 1e300 else f"{value!r:.80}"


def wrong_type(name: str, value: object, message: str) -> UserError:
    return UserError(f"{message}, got {type(value).__name__} {value!r:.80}", field=name)
