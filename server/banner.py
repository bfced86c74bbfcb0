"""What the server prints once it listens: its routes and a call that works."""

from __future__ import annotations

from collections.abc import Sequence

from lmi_server.routes import Route

_EXAMPLE = '{"inputs": "Once upon a time", "parameters": {"max_new_tokens": 64}, "stream": true}'
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def banner(routes: Sequence[Route], host: str, port: int, scheme: str = "http") -> str:
    """A line per route and a ``curl`` command against a reachable address."""
    host = _ANY_ADDRESS.get(host, host)
    url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
    width = max(len(route.path) for route in routes)
    lines = [f"Listening on {url}"]
    lines += [
        f"  {'any' if route.method == '*' else route.method:<5} {route.path:<{width}}  "
        f"{route.purpose}"
        for route in routes
    ]
    lines += ["Try:", f"  curl -N {url}/invocations -H 'Content-Type: application/json' \\"]
    lines += [f"    -d '{_EXAMPLE}'"]
    return "\n".join(lines)
