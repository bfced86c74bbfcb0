"""Errors as TGI reports them: an object with ``error`` and ``error_type``, or plain text.

What the HTTP layer refuses (routing, the shape of a body) is plain text or empty; what the
application refuses is JSON. (TGI's router/src/server.rs.)
"""

from __future__ import annotations

from json.encoder import encode_basestring as quote

from lmi_core.errors import CapacityError, EngineError, LmiError, UserError
from lmi_server.dialects.base import HttpError, Reply

_EMPTY = frozenset({401, 404, 405})


class TgiError(LmiError):
    """An error with a type of its own."""

    def __init__(self, message: str, error_type: str, status: int = 422) -> None:
        super().__init__(message)
        self.error_type = error_type
        self.status = status


class IncompleteGeneration(EngineError):
    """A sequence ended without a reason to, as when the server stops."""


def reply(error: Exception) -> Reply:
    """The response to a call that failed before its body started."""
    if isinstance(error, HttpError):
        return _http_reply(error)
    status, _, _ = _describe(error)
    return Reply(status=status, body=error_object(error))


def error_object(error: Exception, *, streams: bool = False, version: int = 2) -> bytes:
    """The JSON object of an application error; release 3 names one differently in streams."""
    _, error_type, message = _describe(error)
    if isinstance(error, IncompleteGeneration) and streams and version >= 3:
        error_type, message = "incomplete_generation_stream", "Incomplete generation stream"
    return f'{{"error":{quote(message)},"error_type":{quote(error_type)}}}'.encode(
        "utf-8", "replace"
    )


def error_message(error: Exception) -> str:
    """The text of an application error."""
    return _describe(error)[2]


def error_status(error: Exception) -> int:
    """The status that an application error has outside streams."""
    return _describe(error)[0]


def _describe(error: Exception) -> tuple[int, str, str]:
    """Status, ``error_type`` and text."""
    match error:
        case TgiError():
            return error.status, error.error_type, str(error)
        case HttpError(status=503):
            return 503, "healthcheck", "unhealthy"
        case HttpError(status=429):
            return 429, "overloaded", str(error)
        case CapacityError():
            return 429, "overloaded", "Model is overloaded"
        case UserError():
            return 422, "validation", f"Input validation error: {error}"
        case IncompleteGeneration():
            return 500, "incomplete_generation", "Incomplete generation"
        case EngineError():
            return 424, "generation", _generation_text(error)
        case _:
            return 500, "generation", _generation_text(error)


def _generation_text(error: Exception) -> str:
    return f"Request failed during generation: Server error: {error}"


def _http_reply(error: HttpError) -> Reply:
    if error.status == 429:
        return Reply(status=429, body=error_object(error), headers=error.headers)
    if error.status == 503:
        return Reply(status=503, body=error_object(error), close=error.close)
    text = "" if error.status in _EMPTY else str(error)
    if error.status == 413:
        text = "Failed to buffer the request body: length limit exceeded"
    return Reply(
        status=error.status,
        body=text.encode("utf-8", "replace"),
        content_type="text/plain; charset=utf-8",
        headers=error.headers,
        close=error.close,
    )
