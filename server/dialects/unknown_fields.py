"""Fields that nobody here knows: ignored, as the originals do, but never silently."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from lmi_server.dialects.base import Call, HttpError
from lmi_server.dialects.decode import decode_json, malformed

log = logging.getLogger(__name__)

IGNORED_HEADER = "x-lmi-ignored-parameters"
"""Names what was ignored of a request."""
IGNORED = web.RequestKey("ignored", list[str])
"""Fields of the request that nobody here knows."""
_ignored: ContextVar[list[str]] = ContextVar("ignored")

_LABELS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "prediction",
        "moderation",
        "verbosity",
        "request_id",
    }
)
"""OpenAI's fields that don't change the tokens here: labels, billing, and hints."""
_PLAIN_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_MAX_NAMES = 16
_KEYS = msgspec.json.Decoder(dict[str, msgspec.Raw])

Shape = Mapping[str, Any]
"""The fields that an object may have: to the shapes of objects and lists of objects in them, to
``Kinds`` of them, or to None for what is taken as it is."""


def shape(*names: str, **within: Shape | Kinds) -> Shape:
    """Fields whose values are taken as they are, and those that hold objects of a shape."""
    return MappingProxyType({**dict.fromkeys(names), **within})


class Kinds(NamedTuple):
    """The shapes of objects by their field ``type``, and what those are that have none. A type that
    isn't there is for others to refuse."""

    of: Mapping[str, Shape]
    usual: str = ""


def unknown_fields(body: bytes, known: Collection[str], within: Shape | None = None) -> list[str]:
    """The fields of a JSON object, decoded before without a fault, that aren't known; those of
    objects ``within`` it by their path."""
    given = decode_json(_KEYS, body)
    names = given.keys() - _LABELS - set(known)
    for field in (within or {}).keys() & given.keys():
        try:
            value = msgspec.json.decode(given[field])
        except (UnicodeDecodeError, msgspec.DecodeError) as error:  # nobody reads the string
            raise malformed(error, body) from None
        names |= set(_unknown_within(f"{field}.", value, (within or {})[field]))
    return sorted(names)


def unknown_within(values: Mapping[str, Any], within: Shape) -> list[str]:
    """The unknown fields of the objects in a decoded one."""
    names: set[str] = set()
    for field in within.keys() & values.keys():
        names |= set(_unknown_within(f"{field}.", values[field], within[field]))
    return sorted(names)


def _unknown_within(path: str, value: object, known: Shape | Kinds | None) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _unknown_within(path, item, known)
        return
    if isinstance(known, Kinds):
        kind = value.get("type", known.usual) if isinstance(value, dict) else None
        known = known.of.get(kind) if isinstance(kind, str) else None
    if isinstance(value, dict) and known is not None:
        for name, inner in value.items():
            if name not in known:
                yield path + name
            else:
                yield from _unknown_within(f"{path}{name}.", inner, known[name])


def report_fields(
    call: Call, known: Collection[str], within: Shape | None = None
) -> dict[str, str]:
    """Log the ``unknown_fields`` of a call's body; the header that tells the client."""
    return report_unknown(call.request_id, unknown_fields(call.body, known, within), "fields")


def report_unknown(request_id: str, names: Sequence[str], what: str) -> dict[str, str]:
    """Log the names; the header that tells the client."""
    plain = log_ignored(f"request {request_id}:", names, what)
    return {IGNORED_HEADER: ", ".join(plain)} if plain else {}


def log_ignored(whose: str, names: Sequence[str], what: str = "fields") -> list[str]:
    """Log the names and return those that were shown: odd ones, which could forge a line of the
    log or a header, are only counted, and labels are no loss."""
    names = [name for name in names if name not in _LABELS]
    if not names:
        return []
    plain = [name for name in names if _PLAIN_NAME.fullmatch(name)][:_MAX_NAMES]
    more = "" if len(plain) == len(names) else f" (and {len(names) - len(plain)} more)"
    log.warning("%s unknown %s are ignored: %s%s", whose, what, ", ".join(plain), more)
    if (ignored := _ignored.get(None)) is not None:
        ignored += plain or [f"{len(names)} with odd names"]
    return plain


def collect_ignored() -> list[str]:
    """A list that gets the names of what is ignored from now on in this context."""
    ignored: list[str] = []
    _ignored.set(ignored)
    return ignored


def note_ignored(names: Sequence[str]) -> None:
    """What was ignored elsewhere counts in this context."""
    if (ignored := _ignored.get(None)) is not None:
        ignored += [name for name in names if name not in ignored]


def refuse_ignored(ignored: Sequence[str]) -> None:
    """Raise HttpError if there are any: what a server does whose requests are strict."""
    if ignored:
        raise HttpError(
            422,
            "UnprocessableEntityException",
            f"unknown fields: {', '.join(ignored)}; leave them out, or correct their names (this "
            "server refuses what it would ignore: strict_requests)",
        )
