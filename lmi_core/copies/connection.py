"""Messages between a server and its copies, over one socket in one event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from lmi_core.sandbox import message

_FULL_BYTES = 8 << 20
"""That wait to be sent: a second of what a copy says, and more than any request."""

_TURN_S = 0.005
"""Of a turn of the loop, for messages that came together."""


class Connection(asyncio.Protocol):
    """One end: hands over whole messages in their order; what was sent in part when the other end
    went is dropped."""

    def __init__(
        self,
        on_message: Callable[[Any], None],
        on_lost: Callable[[], None],
        on_full: Callable[[bool], None] | None = None,
    ) -> None:
        """``on_lost`` is called once, when nothing can be received or sent any more; ``on_full``
        when the other end hasn't read much of what was sent, and when it has."""
        self._on_message = on_message
        self._on_full = on_full
        self._on_lost = on_lost
        self._received = bytearray()
        self._is_behind = False
        """The rest of what was received is handed over in the next turn of the loop."""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=_FULL_BYTES, low=_FULL_BYTES // 4)

    def pause_writing(self) -> None:
        if self._on_full is not None:
            self._on_full(True)

    def resume_writing(self) -> None:
        if self._on_full is not None:
            self._on_full(False)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._is_behind:
            self._hand_over()

    def _hand_over(self) -> None:
        until_s = time.monotonic() + _TURN_S
        while self._hand_over_one():
            if time.monotonic() >= until_s and self._transport is not None:
                if not self._is_behind:
                    self._transport.pause_reading()
                self._is_behind = True
                asyncio.get_running_loop().call_soon(self._go_on)
                return
        if self._is_behind and self._transport is not None:
            self._transport.resume_reading()
        self._is_behind = False

    def _go_on(self) -> None:
        try:
            self._hand_over()
        except Exception:
            self._is_behind = False  # what came behind it is dropped
            if self._transport is not None:
                self._transport.abort()
            raise

    def _hand_over_one(self) -> bool:
        parts = message.take(self._received)
        if parts is not None:
            self._on_message(message.decode(parts))
        return parts is not None

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        while self._is_behind and self._hand_over_one():
            pass
        self._received.clear()
        self._on_lost()

    def send(self, value: Any) -> None:
        """Nothing happens when the other end is gone: ``on_lost`` was called, or will be."""
        if self._transport is not None and not self._transport.is_closing():
            parts = message.encode(value)
            # writelines of some Pythons (3.12 before .9, 3.13 before .2) never pauses the writer.
            self._transport.write(b"".join([message.head(parts), *parts]))

    def close(self) -> None:
        """Send what is left, then close. Idempotent."""
        if self._transport is not None:
            self._transport.close()
