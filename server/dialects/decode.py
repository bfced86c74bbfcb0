"""JSON bodies into typed structs, with errors that name the field."""

from __future__ import annotations

import re
from collections.abc import Iterator
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
_WRONG_CHOICE = re.compile(r"^Invalid enum value (.*)$", re.DOTALL)
_STEP = re.compile(r"\.(\w+)|\[[^]]*\]")
_WRONG_TYPE = re.compile(r"^Expected `(?P<expected>[^`]*)`, got `(?P<got>[^`]*)`$")


def decode_json(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode a JSON body; UserError names the byte or the field at fault."""
    try:
        check_depth(body)
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _user_error(error, decoder.type, prefix="") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise malformed(error, body) from None


def malformed(error: Exception, body: bytes) -> UserError:
    """The error for a body that a decoder couldn't read."""
    what = "UTF-8" if _is_not_utf8(error) else "JSON"
    return UserError(f"The body is not valid {what}: {malformed_reason(error, body)}")


def _is_not_utf8(error: Exception) -> bool:
    """msgspec raises UnicodeDecodeError before version 0.23 and a DecodeError of its own since."""
    return isinstance(error, UnicodeDecodeError) or str(error).startswith("Invalid UTF-8")


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
    if _is_not_utf8(error):
        return _not_utf8(body)
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
        raise _user_error(error, kind, prefix=name) from None


def decode_text(body: bytes) -> str:
    """A body of plain text; UserError names the byte that isn't UTF-8."""
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise malformed(error, body) from None


def _not_utf8(body: bytes) -> str:
    """The decoder counts from the start of the string at fault; this counts from the body's."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return f"byte {error.start} is invalid"
    return "a string in it is invalid"


def _user_error(error: Exception, kind: Any, *, prefix: str) -> UserError:
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
    if wrong_choice := _WRONG_CHOICE.match(reason):
        allowed = _choices(msgspec.inspect.type_info(kind), match["path"] or "$" if match else "$")
        reason = f"is {wrong_choice[1][:80]}; allowed are {', '.join(map(repr, allowed))}"
        return UserError(f"{path} {reason}", field=field)
    return UserError(f"{path}: {reason}", field=field)


def _choices(kind: msgspec.inspect.Type, path: str) -> list[object]:
    """What a literal at ``path`` of a value of this kind may be."""
    kinds = [kind]
    for step in _STEP.findall(path):
        kinds = [inner for each in _members(kinds) for inner in _inner(each, step)]
    literals = (each for each in _members(kinds) if isinstance(each, msgspec.inspect.LiteralType))
    return [value for each in literals for value in each.values]


def _members(kinds: list[msgspec.inspect.Type]) -> Iterator[msgspec.inspect.Type]:
    for kind in kinds:
        yield from kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)


def _inner(kind: msgspec.inspect.Type, step: str) -> list[msgspec.inspect.Type]:
    """The types of an object's field, of a list's items (``step`` is empty), or of a map's
    values."""
    match kind:
        case msgspec.inspect.StructType():
            return [field.type for field in kind.fields if field.encode_name == step]
        case msgspec.inspect.ListType() if not step:
            return [kind.item_type]
        case msgspec.inspect.DictType() if not step:
            return [kind.value_type]
    return []
