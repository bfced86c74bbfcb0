"""DJL-Serving's routes about the server itself: ``/server/metrics`` and ``/server/logging``."""

from __future__ import annotations

import logging

from aiohttp import web

from lmi_server.dialects.base import HttpError
from lmi_server.dialects.lmi.errors import pretty_json
from lmi_server.dialects.routes import management_route, metrics_route
from lmi_server.http.logging import set_level
from lmi_server.models.model_registry import ModelRegistry

log = logging.getLogger(__name__)

_LEVELS = {
    "trace": "DEBUG",
    "debug": "DEBUG",
    "info": "INFO",
    "warn": "WARNING",
    "warning": "WARNING",
    "error": "ERROR",
}


async def change_level(request: web.Request, models: ModelRegistry) -> web.Response:
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


SERVER_ROUTES = (
    metrics_route("/server/metrics"),
    management_route("POST", "/server/logging", change_level, "set the log level"),
)
