"""Stateful sessions over HTTP, as SageMaker has them (djl_python/session_manager.py).

A client opens one with the session id ``NEW_SESSION`` or the body ``{"requestType":
"NEW_SESSION"}``, sends its id with each request, and closes it with ``{"requestType": "CLOSE"}``.
What a session gives here: the blocks of its last conversation are kept for its next request.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeVar

import msgspec
from aiohttp import web

from lmi_core.errors import UserError
from lmi_server.dialects.base import Call, ParsedCall
from lmi_server.dialects.generation import Parse, Read, generate_with, parse_call
from lmi_server.dialects.lmi.session_store import FIELD, Session, SessionStore
from lmi_server.http.tenants import tenant_name
from lmi_server.models.backend import Pins
from lmi_server.models.loaded_model import LoadedModel

T = TypeVar("T")

_NEW, _CLOSE = "NEW_SESSION", "CLOSE"
_CLOSED_FIELD = "X-Amzn-SageMaker-Closed-Session-Id"
_MAX_ASKED_BYTES = 1024


class _Asked(msgspec.Struct):
    requestType: str | None = None


class Sessions:
    """A model's; UserError for every call where they are off."""

    def __init__(self, model: LoadedModel) -> None:
        options = model.options.lmi.sessions
        self.store = None if options is None else SessionStore(options, model.options.model_name)
        self._turn, self._lock = asyncio.Lock(), threading.Lock()
        self._backend = model.backend

    async def create(self, tenant: str) -> Session:
        store = self._needed()
        for ended in await self._alone(store.end_expired):
            self._unpin(ended)
        return await self._alone(partial(store.create, tenant))

    async def get(self, session_id: str, tenant: str) -> Session:
        return await self._alone(partial(self._needed().get, session_id, tenant))

    async def close(self, session_id: str, tenant: str) -> Session:
        session = await self._alone(partial(self._needed().close, session_id, tenant))
        self._unpin(session)
        return session

    async def _alone(self, work: Callable[[], T]) -> T:
        """In a thread, which goes on where the client leaves meanwhile."""

        def alone() -> T:
            with self._lock:
                return work()

        async with self._turn:  # threads that wait for each other would be missed elsewhere
            return await asyncio.to_thread(alone)

    def ended(self, session: Session) -> None:
        """A request of it has: what it keeps is for nobody where the session was closed before the
        engine had the request."""
        if self.store is not None and not self.store.has(session.id):
            self._unpin(session)

    def _unpin(self, session: Session) -> None:
        if isinstance(self._backend, Pins):
            self._backend.unpin(session.key)

    def _needed(self) -> SessionStore:
        if self.store is None:
            raise UserError(
                "stateful sessions are off; turn them on with option.enable_stateful_sessions, or "
                f"leave {FIELD} out",
                field=FIELD,
            )
        return self.store


async def answer_in_session(
    request: web.Request,
    model: LoadedModel,
    properties: Mapping[str, str],
    parse: Parse,
    read: Read | None,
) -> web.StreamResponse | None:
    """The answer to a call that has to do with sessions; None for any other."""
    sessions, session_id = model.of(Sessions), properties.get(FIELD.lower(), "")
    if not session_id and sessions.store is None:
        return None
    owner = tenant_name(request)
    kind = await _request_type(request, model)
    if kind is not None:
        return await _opened_or_closed(sessions, kind, session_id, owner)
    if not session_id:
        return None
    found = None if session_id == _NEW else await sessions.get(session_id, owner)
    used: list[Session] = []

    async def parsed_in(call: Call) -> ParsedCall:
        parsed = await parse_call(model, parse, call)
        # A call that is refused opens none: nobody would be told of it.
        session = await sessions.create(owner) if found is None else found
        headers = {FIELD: _with_end(session)} if found is None else {}
        used.append(session)
        parsed.renderer.headers = {**parsed.renderer.headers, **headers}
        requests = tuple(replace(each, session=session.key) for each in parsed.requests)
        return replace(parsed, requests=requests)

    try:
        return await generate_with(request, model, parsed_in, read)
    finally:
        for session in used:
            sessions.ended(session)


async def _opened_or_closed(
    sessions: Sessions, kind: str, session_id: str, owner: str
) -> web.Response:
    """The answer to a call that is about nothing else; UserError for one of another kind."""
    if kind == _NEW:
        session = await sessions.create(owner)
        return _answer(f"Session {session.id} created", FIELD, _with_end(session))
    if kind == _CLOSE:
        session = await sessions.close(session_id, owner)
        return _answer(f"Session {session.id} closed", _CLOSED_FIELD, session.id)
    raise UserError(
        f"requestType must be {_NEW} or {_CLOSE}, got {kind[:40]!r}", field="requestType"
    )


async def _request_type(request: web.Request, model: LoadedModel) -> str | None:
    """Of a body that is about sessions, which is a short one."""
    if (request.content_length or 0) > _MAX_ASKED_BYTES:
        return None
    with model.admission.enter():
        body = await model.admission.read_body(request)
    if len(body) > _MAX_ASKED_BYTES or b'"requestType"' not in body:
        return None
    try:
        return msgspec.json.decode(body, type=_Asked).requestType
    except (msgspec.DecodeError, ValueError):
        return None  # the protocol says what is wrong with it


def _with_end(session: Session) -> str:
    return f"{session.id}; Expires={session.expires}"


def _answer(result: str, header: str, value: str) -> web.Response:
    return web.json_response({"result": result}, headers={header: value})
