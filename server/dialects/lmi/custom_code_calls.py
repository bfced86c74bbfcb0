"""HTTP in front of a model's own handler (DJL-Serving's InferenceRequestHandler.java)."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from http import HTTPStatus

from aiohttp import web
from multidict import CIMultiDict

from lmi_core.custom_code.call import HandlerAnswer
from lmi_core.custom_code.errors import FailureKind, HandlerError
from lmi_core.errors import EngineError
from lmi_server.dialects.base import HttpError
from lmi_server.dialects.lmi.output import error_body
from lmi_server.http.form import handler_request
from lmi_server.http.frame_writer import FrameWriter
from lmi_server.http.long_body import body_of
from lmi_server.models.custom_code_backend import CustomCodeBackend
from lmi_server.models.loaded_model import LoadedModel

_FAILURES = {
    FailureKind.CRASHED: (500, "EngineException"),
    FailureKind.TIMEOUT: (500, "EngineException"),
    FailureKind.STOPPED: (400, "TranslateException"),
    FailureKind.MISMATCH: (400, "TranslateException"),
    FailureKind.SHUTDOWN: (503, "WlmException"),
}
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,200}", re.ASCII)
_NOT_TEXT = re.compile(r"[^\t\x20-\x7e\x80-\xff]+")
_OWN_HEADERS = frozenset(
    {"connection", "content-length", "date", "keep-alive", "server", "transfer-encoding", "upgrade"}
)
_MAX_REASON = 200


async def call_custom_code(
    request: web.Request, model: LoadedModel, backend: CustomCodeBackend
) -> web.StreamResponse:
    """The request as an input of the handler, and its output as a response."""
    with model.admission.enter():
        model.shared.loop_lag.wake()
        body = await model.admission.read_body(request)
        try:
            async with backend.pool.call(await handler_request(request, body)) as answer:
                if answer.chunks is None:
                    return _whole(answer)
                return await _stream(
                    request, answer, answer.chunks, send_timeout_s=model.options.send_timeout_s
                )
        except HandlerError as error:
            status, kind = _FAILURES[error.kind]
            raise HttpError(status, kind, str(error)) from None


async def _stream(
    request: web.Request,
    answer: HandlerAnswer,
    chunks: AsyncIterator[bytes],
    *,
    send_timeout_s: float,
) -> web.StreamResponse:
    """The status line waits for the first piece: until then a failure has its own status."""
    chunk = await anext(chunks, b"")
    response = web.StreamResponse(
        status=answer.code, reason=_reason(answer), headers=_headers(answer)
    )
    await response.prepare(request)
    with FrameWriter(request, response, send_timeout_s) as writer:
        await writer.send(chunk)
        try:
            async for chunk in chunks:
                await writer.send(chunk)
        except EngineError as error:
            await writer.send(error_body(error))
        await response.write_eof()
    return response


def _whole(answer: HandlerAnswer) -> web.Response:
    has_body = answer.code not in (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)
    response = web.Response(
        body=body_of(answer.body) if has_body else None,
        status=answer.code,
        reason=_reason(answer),
        headers=_headers(answer),
    )
    if answer.code >= HTTPStatus.BAD_REQUEST:
        response.force_close()
    return response


def _reason(answer: HandlerAnswer) -> str | None:
    """The handler's message as the phrase of the status line."""
    text = _NOT_TEXT.sub(" ", answer.message).encode("latin-1", "replace").decode("latin-1")
    return text[:_MAX_REASON] or None


def _headers(answer: HandlerAnswer) -> CIMultiDict[str]:
    """A handler's properties, except what isn't a header or is the connection's."""
    headers: CIMultiDict[str] = CIMultiDict()
    for name, value in answer.properties.items():
        if _HEADER.fullmatch(name) and name.lower() not in _OWN_HEADERS:
            headers[name] = _NOT_TEXT.sub(" ", value)
    if answer.code != HTTPStatus.NO_CONTENT:
        headers.setdefault("Content-Type", answer.content_type or "application/json")
    return headers
