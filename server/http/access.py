"""Who may call: API keys, and the origins that browsers may call from."""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from aiohttp import web

from lmi_core.config.address import is_loopback
from lmi_server.dialects.base import HttpError
from lmi_server.dialects.routes import Handler, Route

_PREFLIGHT_METHODS = "GET, POST, OPTIONS"
_PREFLIGHT_MAX_AGE_S = 600


class Access:
    """``api_keys``: any of them opens every route; none: no key is needed.

    ``origins``: what ``Access-Control-Allow-Origin`` may say, ``*`` for all; none: no CORS headers.
    ``methods`` and ``headers``: what a preflight is told instead of the usual methods and of the
    headers that it asked for.
    """

    def __init__(
        self,
        api_keys: Sequence[str] = (),
        origins: Sequence[str] = (),
        *,
        methods: str | None = None,
        headers: str | None = None,
        admin_key: str | None = None,
        open_management: bool = False,
    ) -> None:
        """``admin_key``: what opens management routes; without one they are for callers of the
        same machine, other than its browsers, or, with ``open_management``, for everybody."""
        self._keys = tuple(key.encode() for key in api_keys)
        self._admin_keys = () if admin_key is None else (admin_key.encode(),)
        self._open_management = open_management
        self._origins = frozenset(origins)
        self._methods = methods or _PREFLIGHT_METHODS
        self._headers = headers

    def guard(self, route: Route, handler: Handler) -> Handler:
        """``handler``, behind the key that the route needs."""
        keys = self._keys
        if route.is_management:
            keys = self._admin_keys or keys
        is_local = route.is_management and not self._admin_keys and not self._open_management
        if not is_local and (not keys or route.is_open):
            return handler

        async def guarded(request: web.Request) -> web.StreamResponse:
            if is_local:
                _check_local(request)
            if keys:
                _check_key(keys, request.headers.get("Authorization", ""))
            return await handler(request)

        return guarded

    def cors_headers(self, headers: Mapping[str, str], *, for_any: bool = False) -> dict[str, str]:
        """What the answer to a request with these headers has to say about its origin.

        ``for_any``: without configured origins any may call."""
        origin = headers.get("Origin")
        if origin is None or not (self._origins or for_any):
            return {}
        if "*" in self._origins or not self._origins:
            return {"Access-Control-Allow-Origin": "*"}
        allowed = {"Access-Control-Allow-Origin": origin} if origin in self._origins else {}
        return {**allowed, "Vary": "Origin"}

    def preflight(self, request: web.Request, *, for_any: bool = False) -> web.Response | None:
        """The answer to a browser's question before a call; None when this isn't one."""
        asks = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
        if not (self._origins or for_any) or not asks:
            return None
        asked_headers = request.headers.get("Access-Control-Request-Headers", "Content-Type")
        return web.Response(
            status=204,
            headers={
                "Access-Control-Allow-Methods": self._methods,
                "Access-Control-Allow-Headers": self._headers or asked_headers,
                "Access-Control-Max-Age": str(_PREFLIGHT_MAX_AGE_S),
            },
        )


def _check_local(request: web.Request) -> None:
    """The page of a browser on this machine may send requests too, in any site's name."""
    peer = request.remote or ""
    if (
        is_loopback(peer)
        and is_loopback(_host_name(request.host))
        and "Origin" not in request.headers
    ):
        return
    raise HttpError(
        403,
        "ForbiddenException",
        "Management is for programs of the server's own machine, unless the server has an "
        "--admin-key",
    )


def _host_name(host: str) -> str:
    """The name or address in a Host header; empty when the header has none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _check_key(keys: Sequence[bytes], authorization: str) -> None:
    scheme, _, given = authorization.partition(" ")
    key = given.strip().encode("utf-8", "surrogateescape")
    # Every key is compared, so that the time taken doesn't say which one came close.
    matches = [hmac.compare_digest(key, allowed) for allowed in keys]
    if scheme.lower() == "bearer" and any(matches):
        return
    what = "no API key was sent" if not authorization else "the API key is wrong"
    raise HttpError(
        401,
        "UnauthorizedException",
        f"Unauthorized: {what}; send the header Authorization: Bearer KEY",
        headers={"WWW-Authenticate": "Bearer"},
    )
