"""What a route is: method, path, and the function that answers it. Routes are the same for every
server; what differs from model to model the function finds in the model that it gets."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from aiohttp import web

from lmi_server.http.metrics import CONTENT_TYPE
from lmi_server.models.loaded_model import LoadedModel
from lmi_server.models.model_registry import ModelRegistry

T = TypeVar("T")

ModelAnswer = Callable[[web.Request, LoadedModel], Awaitable[web.StreamResponse]]
ServerAnswer = Callable[[web.Request, ModelRegistry], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class _Route(Generic[T]):
    """``method`` "*" answers any method, as DJL-Serving does on inference paths."""

    method: str
    path: str
    answer: Callable[[web.Request, T], Awaitable[web.StreamResponse]]
    purpose: str
    is_open: bool = False
    """Needs no API key: what load balancers ask for health."""
    bodies: tuple[type, ...] = ()
    """The schemas that a body may have; none: it has no body."""
    answers: tuple[str, ...] = ()
    """Content types of successful answers; none: they have no body."""
    is_management: bool = False
    """Changes what is served: exists only on the loopback interface or with an admin key."""


@dataclass(frozen=True, slots=True)
class ModelRoute(_Route[LoadedModel]):
    """A route that one model answers, which is chosen for each request."""


@dataclass(frozen=True, slots=True)
class ServerRoute(_Route[ModelRegistry]):
    """A route about all models: no model is chosen for it."""


Route: TypeAlias = ModelRoute | ServerRoute


def management_route(
    method: str,
    path: str,
    answer: ServerAnswer,
    purpose: str,
    *,
    bodies: tuple[type, ...] = (),
    answers: tuple[str, ...] = ("application/json",),
) -> ServerRoute:
    return ServerRoute(
        method, path, answer, purpose, is_management=True, bodies=bodies, answers=answers
    )


def metrics_route(path: str = "/metrics") -> ServerRoute:
    return ServerRoute("GET", path, _metrics, "Prometheus metrics", answers=("text/plain",))


async def _metrics(request: web.Request, models: ModelRegistry) -> web.Response:
    """Answers a scrape; ``name[]`` asks for some metrics only."""
    return web.Response(
        body=await models.metrics.scrape(request.query.getall("name[]", ())),
        headers={"Content-Type": CONTENT_TYPE},
    )
