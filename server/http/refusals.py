"""Refusals of a server that is full. They must cost little, since there are many of them: no error
is raised and caught, and each text is rendered once."""

from __future__ import annotations

from aiohttp import web

from lmi_core.errors import CapacityError
from lmi_server.dialects.base import Reply
from lmi_server.dialects.table import Dialect
from lmi_server.http.metrics import METER
from lmi_server.models.loaded_model import LoadedModel

_MAX_REPLIES = 256


class Refusals:
    """What one model's dialects say to those for whom there is no place."""

    def __init__(self, model: LoadedModel) -> None:
        self._options = model.options
        self._replies: dict[tuple[str, str, float | None], Reply] = {}

    def response(
        self, request: web.Request, dialect: Dialect, error: CapacityError
    ) -> web.Response:
        message = str(error)
        meter = request[METER]
        meter.error, meter.is_refused = message, True
        key = (dialect.name, message, error.retry_after_s)
        reply = self._replies.get(key)
        if reply is None:
            if len(self._replies) == _MAX_REPLIES:
                self._replies.clear()
            reply = self._replies[key] = dialect.error(error, self._options)
        return response_of(reply)


def response_of(reply: Reply) -> web.Response:
    response = web.Response(
        status=reply.status,
        body=reply.body,
        headers={**reply.headers, "Content-Type": reply.content_type},
    )
    if reply.close:
        response.force_close()
    return response
