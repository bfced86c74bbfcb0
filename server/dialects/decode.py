"""JSON bodies into typed structs, with errors that name the field."""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

import msgspec

from lmi_core.errors import UserError

T = TypeVar("T")

_MSGSPEC_ERROR = re.compile(r"^(?P<reason>.*?)(?: - at `(?P<path>.*)`)?$", re.DOTALL)
MAX_DEPTH = 64
"""Objects and lists within each other."""
MAX_MESSAGES = 100_000
Messages = Annotated[list[dict[str, Any]], msgspec.Meta(max_length=MAX_MESSAGES)]
"""A chat's. Each costs its own time in a chat template, however short it is."""
# A string that doesn't end reaches to the body's end, so that the search is linear.
_STRING_OR_BRACKET = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[][{}]', re.DOTALL)
_LONE_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")
_TOO_MANY = re.compile(r"^Expected `array` of length <= (?P<most>\d+)$")
_WRONG_TYPE = re.compile(r"^Expected `(?P<expected>[^`]*)`, got `(?P<got>[^`]*)`$")


def decode_json(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode a JSON body; UserError names the byte or the field at fault."""
    try:
        check_depth(body)
        return decoder.decode(body)
    except UnicodeDecodeError:
        raise UserError(f"The body is not valid UTF-8: {not_utf8(body)}") from None
    except msgspec.ValidationError as error:
        raise _user_error(error, prefix="") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise UserError(f"The body is not valid JSON: {malformed_reason(error, body)}") from None


def check_depth(body: bytes) -> None:
    """RecursionError when objects and lists are nested more than MAX_DEPTH deep."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(body):
        first = body[match.start()]
        if first in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise RecursionError(f"more than {MAX_DEPTH} levels at byte {match.start()}")
        elif first in b"]}":
            depth -= 1


def malformed_reason(error: Exception, body: bytes) -> str:
    """Why a body isn't JSON that is taken, in one line."""
    if isinstance(error, UnicodeDecodeError):
        return not_utf8(body)
    if isinstance(error, RecursionError):
        return f"nested too deeply, at most {MAX_DEPTH} levels are allowed"
    lone = _LONE_SURROGATE.search(body)
    if lone and "truncated" in str(error):
        return f"lone surrogate {lone[0].decode()} (byte {lone.start()})"
    return str(error).splitlines()[0]


def convert(value: Any, kind: type[T], *, name: str) -> T:
    """Check a decoded value against a struct; ``name`` is its place in the body."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _user_error(error, prefix=name) from None


def decode_text(body: bytes) -> str:
    """A body of plain text; UserError names the byte that isn't UTF-8."""
    try:
        return body.decode()
    except UnicodeDecodeError:
        raise UserError(f"The body is not valid UTF-8: {not_utf8(body)}") from None


def not_utf8(body: bytes) -> str:
    """The decoder counts from the start of the string at fault; this counts from the body's."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return f"byte {error.start} is invalid"
    return "a string in it is invalid"


def _user_error(error: Exception, *, prefix: str) -> UserError:
    match = _MSGSPEC_ERROR.match(str(error))
    reason, path = (match["reason"], match["path"] or "$") if match else (str(error), "$")
    field = (prefix + path.removeprefix("$")).lstrip(".") or None
    path = field or "the body"
    too_many = _TOO_MANY.match(reason)
    if too_many:
        reason = f"has more than {too_many['most']} items, which is the limit"
        return UserError(f"{path} {reason}", field=field)
    wrong_type = _WRONG_TYPE.match(reason)
    if wrong_type:
        reason = f"must be {wrong_type['expected']}, got {wrong_type['got']}"
        return UserError(f"{path} {reason}", field=field)
    return UserError(f"{path}: {reason}", field=field)
