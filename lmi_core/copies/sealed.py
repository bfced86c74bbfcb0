"""Messages between a server and a copy on another machine, over TCP.

Both ends have a secret and say a random number first. Of these they make a key for each direction,
and every frame has a keyed digest of its number and content: nothing is decoded that the other end
hasn't sealed, in this connection and in this order. Nothing is encrypted.

Layout: 16 bytes that name the protocol and 32 random ones; then frames: uint32 length (big-endian),
a digest of 16 bytes, and so many bytes of messages. The first frame is empty.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

from lmi_core.copies.connection import Connection
from lmi_core.sandbox import message

NUM_SECRET_BYTES = 32
_NAME = b"lmi copy, form 1"
_NUM_RANDOM = 32
_HELLO_BYTES = len(_NAME) + _NUM_RANDOM
_LENGTH = struct.Struct(">I")
_DIGEST_BYTES = 16
_HEAD_BYTES = _LENGTH.size + _DIGEST_BYTES
_MAX_FRAME = 16 << 20
"""Of what is longer there are several."""
_HELLO_S = 10.0
_LOST_S = 12
"""After so long without a sign of life a machine counts as gone."""


class SealedConnection(Connection):
    """One end, of which one ``dials``. Messages that are sent before the other end has proved
    itself wait for that."""

    def __init__(
        self,
        on_message: Callable[[Any], None],
        on_lost: Callable[[], None],
        on_full: Callable[[bool], None] | None = None,
        *,
        secret: bytes,
        dials: bool,
        on_proved: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_proved`` is called when the other end has shown that it has the secret."""
        super().__init__(on_message, on_lost, on_full)
        if len(secret) != NUM_SECRET_BYTES:
            raise ValueError(f"the secret has {len(secret)} bytes, not {NUM_SECRET_BYTES}")
        self._secret = secret
        self._on_proved = on_proved
        self._dials = dials
        self._random = secrets.token_bytes(_NUM_RANDOM)
        self._frames = bytearray()
        self._waiting: list[list[bytes | memoryview]] = []
        self._own: _Sealer | None = None
        self._theirs: _Sealer | None = None
        self._is_proved = False
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        keep_alive(transport.get_extra_info("socket"))
        assert self._transport is not None
        self._transport.write(_NAME + self._random)
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(_HELLO_S, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        self._frames += data
        if self._theirs is None and not self._take_hello():
            return
        while (content := self._take_frame()) is not None:
            if self._is_proved:
                super().data_received(content)
            else:
                self._prove()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def send(self, value: Any) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        parts = message.encode(value)
        parts = [message.head(parts), *parts]
        if self._is_proved:
            self._send_frame(parts)
        else:
            self._waiting.append(parts)

    def _take_hello(self) -> bool:
        """Whether keys are there; who says something else is cut off."""
        if not _NAME.startswith(bytes(self._frames[: len(_NAME)])):
            self._cut()
        if len(self._frames) < _HELLO_BYTES:
            return False
        theirs = bytes(self._frames[len(_NAME) : _HELLO_BYTES])
        del self._frames[:_HELLO_BYTES]
        if theirs == self._random:  # our own words
            self._cut()
            return False
        both = self._random + theirs if self._dials else theirs + self._random
        key = hashlib.blake2b(both, key=self._secret, digest_size=32).digest()
        dialer, listener = _Sealer(key, b"dialer"), _Sealer(key, b"listener")
        self._own, self._theirs = (dialer, listener) if self._dials else (listener, dialer)
        self._send_frame([])
        return True

    def _take_frame(self) -> bytes | None:
        """The next whole one's content."""
        assert self._theirs is not None
        if self._transport is None or len(self._frames) < _HEAD_BYTES:
            return None
        [size] = _LENGTH.unpack_from(self._frames)
        if size > (_MAX_FRAME if self._is_proved else 0):
            self._cut()
            return None
        if len(self._frames) < _HEAD_BYTES + size:
            return None
        digest = bytes(self._frames[_LENGTH.size : _HEAD_BYTES])
        content = bytes(self._frames[_HEAD_BYTES : _HEAD_BYTES + size])
        del self._frames[: _HEAD_BYTES + size]
        if not hmac.compare_digest(digest, self._theirs.seal([content])):
            self._cut()
            return None
        return content

    def _prove(self) -> None:
        self._is_proved = True
        assert self._deadline is not None
        self._deadline.cancel()
        waiting, self._waiting = self._waiting, []
        for parts in waiting:
            self._send_frame(parts)
        self._on_proved()

    def _send_frame(self, parts: list[bytes | memoryview]) -> None:
        assert self._own is not None
        assert self._transport is not None
        for frame in _frames(parts):
            size = sum(len(part) for part in frame)
            # writelines of some Pythons (3.12 before .9, 3.13 before .2) never pauses the writer.
            self._transport.write(b"".join([_LENGTH.pack(size), self._own.seal(frame), *frame]))

    def _cut(self) -> None:
        """``on_lost`` follows."""
        self._frames.clear()
        if self._transport is not None:
            self._transport.abort()


def _frames(parts: list[bytes | memoryview]) -> Iterator[list[bytes | memoryview]]:
    """What ``parts`` have, by as much as a frame takes; of nothing one."""
    frame: list[bytes | memoryview] = []
    room = _MAX_FRAME
    for whole in parts:
        part = memoryview(whole)
        while len(part) > room:
            yield [*frame, part[:room]]
            part, frame, room = part[room:], [], _MAX_FRAME
        frame.append(part)
        room -= len(part)
    yield frame


class _Sealer:
    """Digests of one direction's frames, in their order."""

    def __init__(self, key: bytes, direction: bytes) -> None:
        self._key = hashlib.blake2b(direction, key=key, digest_size=32).digest()
        self._number = 0

    def seal(self, parts: list[bytes | memoryview] | list[bytes]) -> bytes:
        digest = hashlib.blake2b(key=self._key, digest_size=_DIGEST_BYTES)
        digest.update(self._number.to_bytes(8, "big"))
        self._number += 1
        for part in parts:
            digest.update(part)
        return digest.digest()


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel notice a machine that is gone, and send small messages at once."""
    for level, option, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _LOST_S // 3),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _LOST_S // 6),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _LOST_S),
    ):
        connection.setsockopt(level, option, value)
