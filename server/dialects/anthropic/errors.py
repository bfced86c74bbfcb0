"""Errors as Anthropic reports them: ``{"type": "error", "error": {"type", "message"}}``."""

from __future__ import annotations

import json

from lmi_server.dialects.base import Reply
from lmi_server.dialects.openai.errors import openai_error

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


def anthropic_error(error: Exception) -> Reply:
    """The response to a call that failed before its body started."""
    reply = openai_error(error)
    return Reply(
        status=reply.status,
        body=_body(reply.status, error),
        headers=reply.headers,
        close=reply.close,
    )


def error_event(error: Exception) -> bytes:
    """The last event of a stream that fails."""
    return b"event: error\ndata: " + _body(openai_error(error).status, error) + b"\n\n"


def _body(status: int, error: Exception) -> bytes:
    kind = _KINDS.get(status) or ("api_error" if status >= 500 else "invalid_request_error")
    detail = {"type": kind, "message": str(error)}
    body = {"type": "error", "error": detail}
    return json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
