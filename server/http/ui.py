"""The page for people at /ui: what the server does, a playground, its configuration, its routes.

/docs has the routes with the fields of their bodies, from /openapi.json, and sends requests. Each
is one file that asks this server only. They are part of no protocol, and there with option ui only.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from aiohttp import web

from lmi_server.dialects.routes import ServerRoute
from lmi_server.http.access import Handler
from lmi_server.models.model_registry import ModelRegistry

PAGE = Path(__file__).with_name("ui.html")
DOCS = Path(__file__).with_name("docs.html")
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


async def show(request: web.Request, models: ModelRegistry) -> web.StreamResponse:
    return _page()


async def show_docs(request: web.Request, models: ModelRegistry) -> web.StreamResponse:
    return _page(DOCS)


async def config(request: web.Request, models: ModelRegistry) -> web.StreamResponse:
    return web.json_response(models.options.ui_report)


UI_ROUTES = (
    ServerRoute("GET", "/ui", show, "page for people", is_open=True, answers=("text/html",)),
    ServerRoute("GET", "/docs", show_docs, "interface", is_open=True, answers=("text/html",)),
    ServerRoute(
        "GET",
        "/ui/config.json",
        config,
        "explanation of the configuration",
        answers=("application/json",),
    ),
)
"""The pages, which anybody may see, and what takes the API key: the configuration."""


def _page(page: Path = PAGE) -> web.Response:
    return web.Response(
        body=_html(page), content_type="text/html", charset="utf-8", headers=_HEADERS
    )


@cache
def _html(page: Path) -> bytes:
    return page.read_bytes()


@web.middleware
async def page_at_root(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Where a protocol's health check is, browsers get the page, which ask for HTML first."""
    accepted = request.headers.get("Accept", "").split(",")[0].partition(";")[0].strip()
    is_asked = request.method in ("GET", "HEAD") and request.path == "/"
    return _page() if is_asked and accepted == "text/html" else await handler(request)
