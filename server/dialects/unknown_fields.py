"""Fields that nobody here knows: ignored, as the originals do, but never silently."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Sequence
from contextvars import ContextVar

import msgspec
from aiohttp import web

from lmi_server.dialects.base import HttpError
from lmi_server.dialects.decode import decode_json

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
        "reasoning_effort",
        "verbosity",
        "request_id",
    }
)
"""OpenAI's fields that don't change the tokens here: labels, billing, and hints."""
_PLAIN_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_MAX_NAMES = 16
_KEYS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def unknown_fields(body: bytes, known: Collection[str]) -> list[str]:
    """The fields of a JSON object, decoded before without a fault, that aren't known."""
    return sorted(decode_json(_KEYS, body).keys() - _LABELS - set(known))


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
