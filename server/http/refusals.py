"""Refusals of a server that is full. They must cost little, since there are many of them: no error
is raised and caught, each text is rendered once, and headers are put together once."""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web
from multidict import CIMultiDict

from lmi_core.version import __version__
from lmi_server.dialects.base import Reply
from lmi_server.dialects.table import Dialect
from lmi_server.http.admission import full
from lmi_server.http.metrics import METER
from lmi_server.models.loaded_model import LoadedModel

SERVER = f"lmi/{__version__}"
_MAX_RENDERED = 256


@dataclass(frozen=True, slots=True)
class _Rendered:
    message: str
    reply: Reply
    headers: CIMultiDict[str]


class Refused(web.Response):
    """Has all headers that answers have in common, but for the request's id and origin."""


class Refusals:
    """What one model's dialects say to those for whom there is no place."""

    def __init__(self, model: LoadedModel) -> None:
        self._options = model.options
        self._rendered: dict[tuple[str, int, float], _Rendered] = {}

    def response(
        self, request: web.Request, dialect: Dialect, num_in_flight: int, wait_s: float
    ) -> web.Response:
        key = (dialect.name, num_in_flight, wait_s)
        rendered = self._rendered.get(key)
        if rendered is None:
            if len(self._rendered) == _MAX_RENDERED:
                self._rendered.clear()
            rendered = self._rendered[key] = self._render(dialect, num_in_flight, wait_s)
        meter = request[METER]
        meter.error, meter.is_refused = rendered.message, True
        reply = rendered.reply
        response = Refused(status=reply.status, body=reply.body, headers=rendered.headers.copy())
        if reply.close:
            response.force_close()
        return response

    def _render(self, dialect: Dialect, num_in_flight: int, wait_s: float) -> _Rendered:
        error = full(num_in_flight, wait_s)
        reply = dialect.error(error, self._options)
        headers = CIMultiDict({**dialect.headers, **_headers(reply), "Server": SERVER})
        if not reply.close:
            headers["Connection"] = "keep-alive"
        return _Rendered(str(error), reply, headers)


def response_of(reply: Reply) -> web.Response:
    response = web.Response(status=reply.status, body=reply.body, headers=_headers(reply))
    if reply.close:
        response.force_close()
    return response


def _headers(reply: Reply) -> dict[str, str]:
    return {**reply.headers, "Content-Type": reply.content_type}
