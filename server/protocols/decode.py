"""JSON bodies into typed structs, with errors that name the field."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from lmi_core.errors import UserError

T = TypeVar("T")

_MSGSPEC_ERROR = re.compile(r"^(?P<reason>.*?)(?: - at `(?P<path>.*)`)?$", re.DOTALL)
_WRONG_TYPE = re.compile(r"^Expected `(?P<expected>[^`]*)`, got `(?P<got>[^`]*)`$")


def decode_json(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode a JSON body; UserError names the byte or the field at fault."""
    try:
        return decoder.decode(body)
    except UnicodeDecodeError:
        raise UserError(_not_utf8(body)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise _user_error(error, prefix="") from None


def convert(value: Any, kind: type[T], *, name: str) -> T:
    """Check a decoded value against a struct; ``name`` is its place in the body."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise _user_error(error, prefix=name) from None


def decode_text(body: bytes) -> str:
    """A body of plain text; UserError names the byte that isn't UTF-8."""
    try:
        return body.decode()
    except UnicodeDecodeError:
        raise UserError(_not_utf8(body)) from None


def _not_utf8(body: bytes) -> str:
    """The decoder counts from the start of the string at fault; this counts from the body's."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return f"The body is not valid UTF-8: byte {error.start} is invalid"
    return "The body is not valid UTF-8"


def _user_error(error: Exception, *, prefix: str) -> UserError:
    if not isinstance(error, msgspec.ValidationError):
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        return UserError(f"The body is not valid JSON: {reason}")
    match = _MSGSPEC_ERROR.match(str(error))
    reason, path = (match["reason"], match["path"] or "$") if match else (str(error), "$")
    path = (prefix + path.removeprefix("$")).lstrip(".") or "the body"
    wrong_type = _WRONG_TYPE.match(reason)
    if wrong_type:
        reason = f"must be {wrong_type['expected']}, got {wrong_type['got']}"
        return UserError(f"{path} {reason}", field=path)
    return UserError(f"{path}: {reason}", field=path)
