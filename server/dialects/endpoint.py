"""One loaded model behind every route: the handlers of all dialects, made for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lmi_server.dialects.anthropic.dialect import anthropic_dialect
from lmi_server.dialects.lmi.dialect import lmi_dialect
from lmi_server.dialects.openai.dialect import openai_dialect
from lmi_server.dialects.routes import Handler, Route, Service
from lmi_server.dialects.table import Dialect, DialectTable
from lmi_server.dialects.tgi.dialect import tgi_dialect

DIALECTS: tuple[Callable[[Service], Dialect], ...] = (
    lmi_dialect,
    openai_dialect,
    anthropic_dialect,
    tgi_dialect,
)
"""Every dialect that a server has."""

RouteKey = tuple[str, str]
"""Method and path of a route; the same for every model."""


class Endpoint:
    """The dialects of one service; ``handlers`` are those of its routes, prefixed ones too."""

    def __init__(self, service: Service, api: str) -> None:
        self.service = service
        self.table = DialectTable([dialect(service) for dialect in DIALECTS], api)
        self.handlers: Mapping[RouteKey, Handler] = {
            key_of(route): route.handler
            for routes in (self.table.routes(), self.table.prefixed_routes())
            for route in routes
        }


def key_of(route: Route) -> RouteKey:
    return route.method, route.path
