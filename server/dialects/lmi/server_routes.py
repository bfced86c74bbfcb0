"""DJL-Serving's routes about the server itself: ``/server/metrics`` and ``/server/logging``."""

from __future__ import annotations

import logging

from aiohttp import web

from lmi_server.dialects.base import HttpError
from lmi_server.dialects.lmi.lmi import pretty_json
from lmi_server.dialects.routes import Route, Service, metrics_route
from lmi_server.http.logging import set_level

log = logging.getLogger(__name__)

_LEVELS = {
    "trace": "DEBUG",
    "debug": "DEBUG",
    "info": "INFO",
    "warn": "WARNING",
    "warning": "WARNING",
    "error": "ERROR",
}


def server_routes(service: Service) -> tuple[Route, ...]:
    return (
        metrics_route(service, "/server/metrics"),
        Route(
            "POST",
            "/server/logging",
            change_level,
            "set the log level",
            is_server_wide=True,
            is_management=True,
            answers=("application/json",),
        ),
    )


async def change_level(request: web.Request) -> web.Response:
    """``?level=``: the least severity that is logged from now on."""
    given = request.query.get("level", "")
    level = _LEVELS.get(given.lower())
    if level is None:
        allowed = ", ".join(_LEVELS)
        message = f"Parameter level is {given[:40]!r}; allowed are {allowed}"
        raise HttpError(400, "BadRequestException", message)
    set_level(level)
    log.warning("the log level is %s now", level)
    return web.Response(body=pretty_json({"status": "OK"}), content_type="application/json")
