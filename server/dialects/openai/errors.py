"""Errors as the OpenAI API reports them: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import json

from lmi_core.errors import CapacityError, ContextLengthError, UserError
from lmi_server.dialects.base import HttpError, Reply

_INVALID = "invalid_request_error"
_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_CODES = {401: "invalid_api_key", 413: "request_too_large"}


class ModelNotFound(UserError):
    """A model that isn't served."""

    def __init__(self, name: str, served: str) -> None:
        """``served``: a sentence about what is served instead."""
        super().__init__(f"The model {name[:200]!r} does not exist; {served}", field="model")


class PreviousResponseNotFound(UserError):
    """A response to go on from that isn't stored."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"Previous response with id {name[:80]!r} not found: it was not stored, was deleted, "
            "or gave way to newer ones (response_store_size); send the whole input",
            field="previous_response_id",
        )


def openai_error(error: Exception) -> Reply:
    """The response to a call that failed before its body started."""
    status, headers, close = _status(error), {}, False
    if isinstance(error, HttpError):
        headers, close = dict(error.headers), error.close
    elif isinstance(error, CapacityError) and error.retry_after_s is not None:
        headers = {"Retry-After": str(max(1, round(error.retry_after_s)))}
    return Reply(status=status, body=error_body(error), headers=headers, close=close)


def error_body(error: Exception) -> bytes:
    """The error object, which is also the last event of a stream that fails."""
    status = _status(error)
    body = {
        "message": str(error),
        "type": _KINDS.get(status) or ("server_error" if status >= 500 else _INVALID),
        "param": error.field if isinstance(error, UserError) else None,
        "code": _code(error, status),
    }
    return json.dumps({"error": body}, ensure_ascii=False).encode("utf-8", "replace")


def _code(error: Exception, status: int) -> str | None:
    match error:
        case ModelNotFound():
            return "model_not_found"
        case PreviousResponseNotFound():
            return "previous_response_not_found"
        case ContextLengthError():
            return "context_length_exceeded"
    return _CODES.get(status)


def _status(error: Exception) -> int:
    match error:
        case HttpError():
            return error.status
        case ModelNotFound():
            return 404
        case CapacityError():
            return 429
        case UserError():
            return 400
        case _:
            return 500
