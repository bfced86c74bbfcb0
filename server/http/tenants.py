"""Tenants: each API key is one, and callers without a key are one together.

A tenant's requests share cached prefixes with its own only: ``cached_tokens``, or the time to the
first token, would else tell one what another has asked. Its limits are its own: what one uses up,
others don't miss. Where several want more than there is, each gets as much as the others.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from aiohttp import web

from lmi_core.engine.request import GenerationRequest
from lmi_core.runners.prefix_secret import derived, installation_secret
from lmi_server.dialects.base import HttpError
from lmi_server.http.metrics import RequestMeter

_MINUTE_S = 60.0
_SALT_KEY = "tenants' salts"
_secret = secrets.token_bytes(32)
"""Makes salts that no client can write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """What one tenant may use; None: no limit."""

    max_requests: int | None = None
    """Requests in flight."""
    tokens_per_minute: int | None = None
    """Of prompts and answers; a minute's worth may be used at once."""

    @property
    def exist(self) -> bool:
        return self.max_requests is not None or self.tokens_per_minute is not None


NO_LIMITS = TenantLimits()


class Tenant:
    """One caller's share of the server. All calls come from the event loop."""

    def __init__(
        self,
        limits: TenantLimits,
        salt: str = "",
        *,
        name: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        """What its receipts lie under and the engine shares rows by, which doesn't tell the key."""
        self._limits = limits
        self._salt = salt
        self._clock = clock
        self._settled_at = clock()
        self._tokens_left = float(limits.tokens_per_minute or 0)
        self._running: dict[RequestMeter, int] = {}
        """Calls in flight, and how many of their tokens are paid for."""

    @contextmanager
    def enter(self, meter: RequestMeter) -> Iterator[None]:
        """Hold a place for a call; HttpError 429 says when there may be one.

        A call pays for its tokens as they come, so that its tenant can be in debt when it ends.
        """
        self._check()
        self._running[meter] = 0
        try:
            yield
        finally:
            self._pay(meter)
            del self._running[meter]

    def owned(self, request: GenerationRequest) -> GenerationRequest:
        """The request in the tenant's name, with its salt before the request's own."""
        salt = f"{self._salt}/{request.cache_salt}" if self._salt else request.cache_salt
        return replace(request, tenant=self.name, cache_salt=salt)

    def _check(self) -> None:
        most, per_minute = self._limits.max_requests, self._limits.tokens_per_minute
        if most is not None and len(self._running) >= most:
            raise _refusal(
                f"{len(self._running)} requests of this API key are being served, which is its "
                "limit (max_tenant_requests)",
                1.0,
            )
        if per_minute is None:
            return
        now = self._clock()
        earned = (now - self._settled_at) * per_minute / _MINUTE_S
        self._tokens_left = min(float(per_minute), self._tokens_left + earned)
        self._settled_at = now
        for meter in self._running:
            self._pay(meter)
        if self._tokens_left <= 0:
            raise _refusal(
                f"this API key has used its {per_minute} tokens a minute "
                "(max_tenant_tokens_per_minute)",
                -self._tokens_left * _MINUTE_S / per_minute,
            )

    def _pay(self, meter: RequestMeter) -> None:
        used = meter.num_prompt_tokens + meter.num_generated_tokens
        self._tokens_left -= used - self._running[meter]
        self._running[meter] = used


TENANT: web.RequestKey[Tenant] = web.RequestKey("tenant", Tenant)


def owned(http: web.Request, request: GenerationRequest) -> GenerationRequest:
    """The request as that of the tenant who has sent it."""
    tenant = http.get(TENANT)
    return request if tenant is None else tenant.owned(request)


def tenant_name(http: web.Request) -> str:
    """The name of the tenant who has sent a request; "" where there are no tenants."""
    tenant = http.get(TENANT)
    return "" if tenant is None else tenant.name


def name_of(key: bytes) -> str:
    """The same after every start, unlike the salt."""
    return hashlib.blake2b(key, digest_size=8, person=b"lmi tenant").hexdigest()


def keep_salts(directory: Path) -> None:
    """Make the salts from the secret of a directory for prefixes that outlast the process."""
    global _secret
    with suppress(OSError):  # nothing outlasts the process then
        _secret = derived(installation_secret(directory), _SALT_KEY, len(_secret))


def salt_of(key: bytes) -> str:
    """What separates a key's prefixes from others'; nobody who has the key can know it."""
    return hmac.new(_secret, key, hashlib.sha256).hexdigest()


def _refusal(message: str, wait_s: float) -> HttpError:
    headers = {"Retry-After": str(max(1, math.ceil(wait_s)))}
    return HttpError(429, "ThrottlingException", f"Too many requests: {message}", headers=headers)
