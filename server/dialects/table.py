"""Which protocol answers which path: several dialects share one port.

A path belongs, by its first segment, to one dialect. The option ``api`` says which dialects are
asked, in order; the first that has a route with the segment owns it, and answers its errors too.
``/NAME/...`` always reaches the dialect of that name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lmi_core.errors import UserError
from lmi_server.dialects.base import Reply
from lmi_server.dialects.routes import Route
from lmi_server.http.options import ServerOptions

PRECEDENCE: Mapping[str, tuple[str, ...]] = {
    "lmi": ("lmi", "openai", "anthropic", "tgi", "tei"),
    "tgi": ("tgi", "tei"),
    "openai": ("openai", "anthropic", "lmi", "tgi", "tei"),
}
"""For each value of ``api``, the dialects that serve paths without a prefix."""


USUAL_STATUSES = {
    400: "the request can't be served as written",
    401: "the API key is missing or wrong",
    404: "no such route or model",
    405: "wrong method",
    408: "the body came too slowly",
    413: "the body is too long",
    415: "the body isn't JSON",
    429: "the server is full",
    500: "the server failed",
    503: "the server is not ready or stopping",
}
"""Of protocols whose errors have HTTP's own statuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorForm:
    """How a dialect's errors look, for documents."""

    schema: Mapping[str, object]
    """JSON schema of an error's body."""
    statuses: Mapping[int, str]
    """Statuses that its routes answer with, and when."""
    has_text: bool = False
    """Some errors are plain text instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """A protocol's routes (without prefix) and the form of its errors."""

    name: str
    routes: tuple[Route, ...]
    error: Callable[[Exception, ServerOptions], Reply]
    """Also renders what HTTP or routing refuse (HttpError); with the options of the model that was
    chosen, or of the server."""
    errors: ErrorForm
    headers: Mapping[str, str] = field(default_factory=dict)
    """On every response, unless the response sets them itself."""
    prefixes: tuple[str, ...] = ()
    """Beginnings of paths that are its own, whoever has their first segment; empty: it goes by
    segments."""
    has_open_calls: bool = False
    """Pages of any site may post to its routes where ``api`` is this dialect and no origins are
    configured; a model's own code isn't for them."""

    @property
    def segments(self) -> frozenset[str]:
        return frozenset(first_segment(route.path) for route in self.routes)


class DialectTable:
    """The dialects of one server and who owns what."""

    def __init__(self, dialects: Sequence[Dialect], api: str) -> None:
        """UserError when ``api`` isn't one of them."""
        self._by_name = {dialect.name: dialect for dialect in dialects}
        if api not in self._by_name:
            allowed = ", ".join(self._by_name)
            raise UserError(f"api is {api!r}; allowed are {allowed}", field="api")
        self.main = self._by_name[api]
        self._owners: dict[str, Dialect] = {}
        for name in PRECEDENCE[api]:
            if name in self._by_name:
                dialect = self._by_name[name]
                for part in dialect.prefixes or dialect.segments:
                    self._owners.setdefault(part, dialect)
        self._by_path: dict[str, Dialect] = {}
        """Of routes: asked for several times for each request."""
        self._prefixes = [each for each in self._owners.items() if each[1].prefixes]
        self._by_path |= {route.path: self.of(route.path) for route in self.routes()}
        self._by_path |= {route.path: self.of(route.path) for route in self.prefixed_routes()}

    def of(self, path: str) -> Dialect:
        """The dialect that answers a path, be it a route or not."""
        if (known := self._by_path.get(path)) is not None:
            return known
        segment = first_segment(path)
        if segment in self._by_name:
            return self._by_name[segment]
        return self._owner(path) or self.main

    def _owner(self, path: str) -> Dialect | None:
        """The dialect of a path without a dialect's name."""
        for part, dialect in self._prefixes:
            if path.startswith(part) and path[len(part) : len(part) + 1] in ("", "/"):
                return dialect
        return self._owners.get(first_segment(path))

    def routes(self) -> Iterator[Route]:
        """The routes without a prefix."""
        for _, route in self.owned_routes():
            yield route

    def owned_routes(self) -> Iterator[tuple[Dialect, Route]]:
        """The routes without a prefix, and whose they are."""
        for dialect in self._by_name.values():
            for route in dialect.routes:
                if self._owner(route.path) is dialect:
                    yield dialect, route

    def prefixed_routes(self) -> Iterator[Route]:
        """Every dialect's routes under its name."""
        for dialect in self._by_name.values():
            for route in dialect.routes:
                yield replace(route, path=f"/{dialect.name}{route.path}")


def first_segment(path: str) -> str:
    """``/v1/models`` and ``//v1/models`` have ``v1``; ``/`` has the empty one."""
    return path.lstrip("/").partition("/")[0] if path.startswith("/") else path
