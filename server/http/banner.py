"""What the server prints once it listens: its routes and a call that works."""

from __future__ import annotations

from collections.abc import Sequence

from lmi_server.dialects.routes import Route

_EXAMPLE = '{"inputs": "Once upon a time", "parameters": {"max_new_tokens": 64}, "stream": true}'
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def banner(
    routes: Sequence[Route],
    url: str,
    management_url: str | None = None,
    *,
    scope: str = "",
    needs_key: bool = False,
) -> str:
    """A line per route and a ``curl`` command. ``scope``: who else reaches the URL's port."""
    width = max((len(route.path) for route in routes), default=0)
    lines = [f"Listening on {url}{scope}"]
    lines += [
        f"  {'any' if route.method == '*' else route.method:<6} {route.path:<{width}}  "
        f"{route.purpose}"
        for route in routes
    ]
    if management_url is not None:
        lines.append(f"Management on {management_url}")
    lines += ["Try:", f"  curl -N {url}/invocations -H 'Content-Type: application/json' \\"]
    if needs_key:
        lines += ["    -H 'Authorization: Bearer KEY' \\"]
    lines += [f"    -d '{_EXAMPLE}'"]
    return "\n".join(lines)


def scope_of(host: str) -> str:
    """What the banner adds about the address that is listened on."""
    return f" (and on every other address, {host})" if host in _ANY_ADDRESS and host else ""


def reachable_url(host: str, port: int, *, is_https: bool) -> str:
    """The URL by which this machine reaches a server that listens on ``host``."""
    host = _ANY_ADDRESS.get(host, host)
    scheme = "https" if is_https else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
