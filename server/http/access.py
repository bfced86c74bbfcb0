"""Who may call: API keys, and the origins that browsers may call from."""

from __future__ import annotations

import hmac
import re
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web

from lmi_core.config.address import is_loopback
from lmi_core.engine.request import GenerationRequest
from lmi_core.sandbox.pool import CLIENT
from lmi_server.dialects.base import HttpError
from lmi_server.dialects.routes import Route
from lmi_server.http.metrics import METER
from lmi_server.http.tenants import NO_LIMITS, TENANT, Tenant, TenantLimits, name_of, salt_of

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_PREFLIGHT_METHODS = "GET, POST, OPTIONS"
_PREFLIGHT_MAX_AGE_S = 600
_HOST = re.compile(r"(?P<name>[\w.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?", re.ASCII)
_FORWARDED = re.compile(
    "forwarded|via|(x|true|cf|fastly)-((original-|cluster-)?forwarded-.+|real-ip|client-ip"
    "|connecting-ip|original-.+|envoy-external-address)",
    re.IGNORECASE,
)
"""Headers by which a proxy tells whom it asks for."""


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
        limits: TenantLimits = NO_LIMITS,
        shares_prefix_cache: bool = False,
    ) -> None:
        """``admin_key``: what opens management routes; without one they are for callers of the
        same machine, other than its browsers, or, with ``open_management``, for everybody.
        ``limits``: those of each key. ``shares_prefix_cache``: keys share cached prefixes."""
        self._keys = tuple(dict.fromkeys(key.encode() for key in api_keys))
        has_salts = len(self._keys) > 1 and not shares_prefix_cache
        self._tenants = [
            Tenant(limits, salt_of(key) if has_salts else "", name=name_of(key))
            for key in self._keys
        ]
        if not self._keys and limits.exist:
            self._tenants = [Tenant(limits)]
        self._admin_keys = () if admin_key is None else (admin_key.encode(),)
        self._open_management = open_management
        self._origins = frozenset(origins)
        self._methods = methods or _PREFLIGHT_METHODS
        self._headers = headers

    @property
    def managers(self) -> str:
        """Whose calls the management routes let through, in a word."""
        if self._admin_keys:
            return "admin key"
        return ("anyone" if self._open_management else "local") + (
            " with an API key" if self._keys else ""
        )

    def guard(self, route: Route, handler: Handler) -> Handler:
        """``handler``, behind the key that the route needs."""
        keys = self._keys
        if route.is_management:
            keys = self._admin_keys or keys
        is_local = route.is_management and not self._admin_keys and not self._open_management
        tenants = [] if route.is_management or route.is_open else self._tenants
        if not is_local and not tenants and (not keys or route.is_open):
            return handler

        async def guarded(request: web.Request) -> web.StreamResponse:
            if is_local:
                _check_local(request)
            key_id = _check_key(keys, _authorization(request)) if keys else 0
            if not tenants:
                return await handler(request)
            tenant = request[TENANT] = tenants[key_id]
            if len(tenants) > 1:  # with one, a client is an address
                CLIENT.set(f"key {key_id}")
            with tenant.enter(request[METER]):
                return await handler(request)

        return guarded

    def owned(self, tenant: str, request: GenerationRequest) -> GenerationRequest:
        """A request in the name of a tenant that isn't here now."""
        known = (each for each in self._tenants if each.name == tenant)
        return next(known, Tenant(NO_LIMITS, tenant, name=tenant)).owned(request)

    def cors_headers(self, origin: str, *, for_any: bool) -> dict[str, str]:
        """What the answer to a page of an origin has to say about that.

        ``for_any``: without configured origins any may call."""
        if not (self._origins or for_any):
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
    """A browser on this machine sends requests too, in any site's name, and a proxy on it those of
    others."""
    hosts = request.headers.getall("Host", ())
    if (
        is_loopback(request.remote or "")
        and len(hosts) == 1
        and is_loopback(_host_name(hosts[0]))
        and "Origin" not in request.headers
        and not any(map(_FORWARDED.fullmatch, request.headers))
    ):
        return
    raise HttpError(
        403,
        "ForbiddenException",
        "Management is for programs of the server's own machine, not for its browsers and proxies, "
        "unless the server has an --admin-key",
    )


def _host_name(host: str) -> str:
    """The name or address in a Host header; empty where it is not that and a port alone."""
    match = _HOST.fullmatch(host)
    return "" if match is None else match["name"].strip("[]").lower()


def _authorization(request: web.Request) -> str:
    """As Anthropic's clients send it, too: in a header of its own."""
    given = request.headers.get("Authorization", "")
    key = request.headers.get("x-api-key")
    return given if given or key is None else f"Bearer {key}"


def _check_key(keys: Sequence[bytes], authorization: str) -> int:
    """Which of the keys was sent; HttpError for none of them."""
    scheme, _, given = authorization.partition(" ")
    key = given.strip().encode("utf-8", "surrogateescape")
    # Every key is compared, so that the time taken doesn't say which one came close.
    matches = [hmac.compare_digest(key, allowed) for allowed in keys]
    if scheme.lower() == "bearer" and any(matches):
        return matches.index(True)
    what = "no API key was sent" if not authorization else "the API key is wrong"
    raise HttpError(
        401,
        "UnauthorizedException",
        f"Unauthorized: {what}; send the header Authorization: Bearer KEY",
        headers={"WWW-Authenticate": "Bearer"},
    )
