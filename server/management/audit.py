"""One line of the log for each management call: who asked for what, and how it ended.

URLs are written without queries and names of users, which may hold what opens them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

from aiohttp import web
from aiohttp.typedefs import Handler

SAID: web.RequestKey[dict[str, str]] = web.RequestKey("said", dict)
"""What a management call says beside its path; handlers add what their body says."""

_MAX_SHOWN = 200
_SECRET_IN_URL = re.compile(r"(?<=://)[^/@]*@|[?#].*", re.DOTALL)
audit_log = logging.getLogger("lmi_server.management.audit")


def audited(handler: Handler) -> Handler:
    """``handler``, with its calls marked."""

    async def marked(request: web.Request) -> web.StreamResponse:
        request[SAID] = dict(request.query)
        return await handler(request)

    return marked


def log_call(
    request: web.Request, said: Mapping[str, str], *, request_id: str, status: int, by: str
) -> None:
    """Write the line of an answered call; ``by`` says whose calls are let through."""
    fields: dict[str, object] = {
        "id": request_id,
        "peer": request.remote or "",
        "by": by,
        "method": request.method,
        "path": request.path[:_MAX_SHOWN],
        "status": status,
    }
    for name in ("Forwarded", "X-Forwarded-For"):
        if name in request.headers:
            fields["forwarded_for"] = request.headers[name][:_MAX_SHOWN]
    for name, value in said.items():
        fields.setdefault(name[:_MAX_SHOWN], _SECRET_IN_URL.sub("", value)[:_MAX_SHOWN])
    audit_log.info("management", extra={"fields": fields})
