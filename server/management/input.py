"""What management calls say: numbers and truth values in a query, and what is wrong with them."""

from __future__ import annotations

from lmi_server.dialects.base import HttpError

MAX_BODY_BYTES = 1 << 20
"""What is read of a management call: a few names and texts."""
_TRUE, _FALSE = ("true", "1"), ("false", "0")


def bad_request(message: str) -> HttpError:
    return HttpError(400, "BadRequestException", message)


def integer(text: str, name: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise bad_request(f"Parameter {name} is not a number: {text[:40]!r}") from None


def truth(text: str, name: str) -> bool:
    if text.lower() in (*_TRUE, *_FALSE):
        return text.lower() in _TRUE
    raise bad_request(f"Parameter {name} is {text[:40]!r}; allowed are true and false")
