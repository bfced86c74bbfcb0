"""The page for people at /ui: what the server does, a playground, its configuration, its routes.

One file that asks this server only. It is not part of any protocol, and there only with option ui.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from aiohttp import web

from lmi_server.dialects.routes import Handler, Route
from lmi_server.http.options import ServerOptions

PAGE = Path(__file__).with_name("ui.html")
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def ui_routes(options: ServerOptions) -> tuple[Route, ...]:
    """The page, which anybody may see, and what takes the API key: the configuration."""
    if not options.ui:
        return ()

    async def config(request: web.Request) -> web.StreamResponse:
        return web.json_response(options.ui_report)

    return (
        Route("GET", "/ui", show, "page for people", is_open=True, answers=("text/html",)),
        Route(
            "GET",
            "/ui/config.json",
            config,
            "explanation of the configuration",
            answers=("application/json",),
        ),
    )


async def show(request: web.Request) -> web.StreamResponse:
    return web.Response(body=_page(), content_type="text/html", charset="utf-8", headers=_HEADERS)


@cache
def _page() -> bytes:
    return PAGE.read_bytes()


@web.middleware
async def page_at_root(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Where a protocol's health check is, browsers get the page, which ask for HTML first."""
    accepted = request.headers.get("Accept", "").split(",")[0].partition(";")[0].strip()
    is_asked = request.method in ("GET", "HEAD") and request.path == "/"
    return await (show if is_asked and accepted == "text/html" else handler)(request)
