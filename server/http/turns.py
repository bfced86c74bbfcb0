"""The server's event loop: of connections that are ready together, some in each of its turns."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any

MOST_EVENTS = 64
"""A request that comes, or ends with its connection, takes some 0.2 ms."""


class _FewEvents:
    """An epoll object, which begins the next time with those that it hasn't told of."""

    def __init__(self, epoll: Any) -> None:
        self._epoll = epoll

    def __getattr__(self, name: str) -> Any:
        return getattr(self._epoll, name)

    def poll(self, timeout: float, most: int) -> list[tuple[int, int]]:
        events: list[tuple[int, int]] = self._epoll.poll(timeout, min(most, MOST_EVENTS))
        return events


class TurnSelector(selectors.EpollSelector):
    """Tells of ``MOST_EVENTS`` at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._selector: Any = _FewEvents(self._selector)


def new_event_loop() -> asyncio.AbstractEventLoop:
    return asyncio.SelectorEventLoop(TurnSelector())
