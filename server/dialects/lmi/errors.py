"""Errors as LMI's containers answer them."""

from __future__ import annotations

import json
from dataclasses import replace

from lmi_core.errors import CapacityError, EngineError, UserError
from lmi_server.dialects.base import HttpError, Reply
from lmi_server.dialects.lmi.output import error_body, error_code
from lmi_server.dialects.lmi.release import Release
from lmi_server.http.options import ServerOptions

_STATUS_OPTIONS = {
    "BadRequestException": "bad_request",
    "WlmException": "wlm_error",
    "WlmCapacityException": "throttle_error",
    "InternalServerException": "server_error",
}


def lmi_error(error: Exception, options: ServerOptions) -> Reply:
    """As DJL-Serving does, connections end with a status that says so."""
    reply = _reply(error, options)
    return replace(reply, close=True) if reply.status >= 400 else reply


def _reply(error: Exception, options: ServerOptions) -> Reply:
    release = options.lmi.form
    match error:
        case HttpError(status=413):
            return Reply(status=413, body=b"", close=True)
        case HttpError():
            status = _status(options, error.kind, error.status)
            return Reply(
                status=status,
                body=server_error(status, error.kind, str(error)),
                headers=error.headers,
                close=error.close,
            )
        case CapacityError():
            return _capacity(error, options)
        case UserError() | EngineError():
            code, body = error_code(error, release), error_body(error, release)
            has_status = release in (Release.V0_24, Release.V0_29)
            return Reply(status=code if has_status else 200, body=body)
        case _:
            kind = "InternalServerException"
            status = _status(options, kind, 500)
            return Reply(status=status, body=server_error(status, kind, str(error)))


def _status(options: ServerOptions, kind: str, status: int) -> int:
    """The configured status of a kind of failure."""
    return options.lmi.statuses.get(_STATUS_OPTIONS.get(kind, ""), status)


def _capacity(error: CapacityError, options: ServerOptions) -> Reply:
    message = f"Worker queue capacity exceeded for model: {options.model_name} ({error})"
    retry_after = {}
    if error.retry_after_s is not None:
        retry_after["Retry-After"] = str(max(1, round(error.retry_after_s)))
    status = _status(options, "WlmCapacityException", 503)
    return Reply(
        status=status,
        body=server_error(status, "WlmCapacityException", message),
        headers=retry_after,
    )


def server_error(status: int, kind: str, message: str) -> bytes:
    """The error object of DJL-Serving itself."""
    return pretty_json({"code": status, "type": kind, "message": message})


def pretty_json(value: object) -> bytes:
    """JSON as DJL-Serving prints its own: indented, with a final newline."""
    text = json.dumps(value, ensure_ascii=False, indent=2) + "\n"
    return text.encode("utf-8", "replace")
