"""Responses that can be asked for again, and gone on from: in memory, the newest that fit."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from lmi_server.dialects.base import HttpError

_MAX_CONVERSATION_BYTES = 4 << 20
"""A longer one would take the event loop too long to read again."""
_OVERHEAD_BYTES = 1024
"""Of an entry besides its texts."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A response, and the messages that another one goes on from, as JSON."""

    response: bytes
    messages: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.messages) + _OVERHEAD_BYTES


class ResponseStore:
    """Each tenant's responses by their ids, for any thread: a long response is made in one."""

    def __init__(self, max_bytes: int) -> None:
        """``max_bytes``: of all responses; when they are more, the oldest are forgotten. 0: none
        are stored."""
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._stored: OrderedDict[tuple[str, str], Stored] = OrderedDict()

    @property
    def is_on(self) -> bool:
        return self._max_bytes > 0

    def put(self, tenant: str, response_id: str, stored: Stored) -> bool:
        """Whether it is kept: a conversation that is too long for the store isn't."""
        most = min(self._max_bytes, _MAX_CONVERSATION_BYTES)
        if stored.num_bytes > most:
            return False
        with self._lock:
            self._stored[tenant, response_id] = stored
            self._num_bytes += stored.num_bytes
            while self._num_bytes > self._max_bytes:
                _, oldest = self._stored.popitem(last=False)
                self._num_bytes -= oldest.num_bytes
        return True

    def find(self, tenant: str, response_id: str) -> Stored | None:
        """Being asked for keeps a response from being forgotten."""
        with self._lock:
            stored = self._stored.get((tenant, response_id))
            if stored is not None:
                self._stored.move_to_end((tenant, response_id))
        return stored

    def get(self, tenant: str, response_id: str) -> Stored:
        """HttpError 404 for one that isn't there."""
        stored = self.find(tenant, response_id)
        if stored is None:
            raise HttpError(404, "NotFound", self.missing(response_id))
        return stored

    def delete(self, tenant: str, response_id: str) -> None:
        """HttpError 404 for one that isn't there."""
        with self._lock:
            stored = self._stored.pop((tenant, response_id), None)
            if stored is not None:
                self._num_bytes -= stored.num_bytes
                return
        raise HttpError(404, "NotFound", self.missing(response_id))

    def missing(self, response_id: str) -> str:
        """Why a response isn't there."""
        if not self.is_on:
            return "responses aren't stored here (response_store_size is 0); send the whole input"
        return (
            f"Response with id {response_id[:80]!r} not found: it was not stored, was deleted, or "
            "gave way to newer ones (response_store_size)"
        )
