"""Connections between machines: what was sealed arrives, and nothing else is decoded."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import pytest

from lmi_core.copies import sealed as module
from lmi_core.copies.connection import Connection
from lmi_core.copies.sealed import SealedConnection
from tests.engine.harness import until

SECRET, OTHER = b"s" * 32, b"o" * 32


class End:
    """One end, with what it got."""

    def __init__(self, secret: bytes = SECRET, *, dials: bool) -> None:
        self.got: list[Any] = []
        self.num_lost = self.num_proved = 0
        self.connection = SealedConnection(
            self.got.append, self._lose, secret=secret, dials=dials, on_proved=self._prove
        )

    def _lose(self) -> None:
        self.num_lost += 1

    def _prove(self) -> None:
        self.num_proved += 1


@asynccontextmanager
async def connected(
    listener: End, dialer: End, change: Callable[[bytes], bytes] = bytes
) -> AsyncIterator[None]:
    """Both over TCP; ``change``: of what goes to the listener, piece by piece."""
    loop, is_over = asyncio.get_running_loop(), asyncio.Event()
    server = await loop.create_server(lambda: listener.connection, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ours, out = await asyncio.open_connection("127.0.0.1", port)

        async def copy(
            source: asyncio.StreamReader, sink: asyncio.StreamWriter, change: Callable[..., bytes]
        ) -> None:
            with suppress(ConnectionError):
                while data := await source.read(1 << 16):
                    sink.write(change(data))
            sink.close()

        await asyncio.gather(copy(reader, out, change), copy(ours, writer, bytes))
        is_over.set()

    middle = await asyncio.start_server(pass_on, "127.0.0.1", 0)
    await loop.create_connection(
        lambda: dialer.connection, "127.0.0.1", middle.sockets[0].getsockname()[1]
    )
    yield
    dialer.connection.close()
    listener.connection.close()
    await is_over.wait()
    middle.close()
    server.close()


def test_messages_arrive_in_their_order_whatever_the_pieces() -> None:
    async def main() -> None:
        listener, dialer = End(dials=False), End(dials=True)
        async with connected(listener, dialer):
            dialer.connection.send(("before the proof", b"x" * 300_000))
            await until(lambda: listener.num_proved == dialer.num_proved == 1)
            listener.connection.send({"back": 1})
            for i in range(50):
                dialer.connection.send(i)
            await until(lambda: len(listener.got) == 51 and len(dialer.got) == 1)
            assert listener.got == [("before the proof", b"x" * 300_000), *range(50)]
            assert dialer.got == [{"back": 1}]
            dialer.connection.close()
            await until(lambda: listener.num_lost == dialer.num_lost == 1)

    asyncio.run(main())


def test_long_messages_are_several_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_FRAME", 1000)
    values = [b"a" * 999, (b"b" * 3500, bytearray(b"c" * 2001)), "", b"d" * 10_000]

    async def main() -> None:
        listener, dialer = End(dials=False), End(dials=True)
        async with connected(listener, dialer):
            for value in values:
                dialer.connection.send(value)
            await until(lambda: len(listener.got) == len(values))
            assert listener.got == values

    asyncio.run(main())


def test_who_sends_hears_that_nobody_reads() -> None:
    async def main() -> None:
        heard: list[bool] = []
        ours, theirs = socket.socketpair()
        with theirs:
            connection = Connection(lambda _: None, lambda: None, heard.append)
            await asyncio.get_running_loop().create_connection(lambda: connection, sock=ours)
            for _ in range(12):
                connection.send(bytes(1 << 20))
            assert heard == [True]
            theirs.setblocking(False)
            while heard == [True]:
                with suppress(BlockingIOError):
                    theirs.recv(1 << 20)
                await asyncio.sleep(0)
            assert heard == [True, False]
            connection.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_nobody_without_the_secret_is_heard() -> None:
    async def main() -> None:
        listener, dialer = End(dials=False), End(OTHER, dials=True)
        async with connected(listener, dialer):
            dialer.connection.send(("run", "this"))
            await until(lambda: listener.num_lost == dialer.num_lost == 1)
        assert listener.num_proved == dialer.num_proved == 0
        assert listener.got == []

    asyncio.run(main())


def flipped(data: bytes, *, seen: list[bytes]) -> bytes:
    """Changes the last byte of the third piece on."""
    seen.append(data)
    return data if len(seen) < 3 else data[:-1] + bytes([data[-1] ^ 1])


def repeated(data: bytes, *, seen: list[bytes]) -> bytes:
    seen.append(data)
    return data if len(seen) < 3 else 2 * data


@pytest.mark.parametrize(("change", "num_heard"), [(flipped, 0), (repeated, 1)])
def test_what_was_changed_or_repeated_ends_the_connection(
    change: Callable[..., bytes], num_heard: int
) -> None:
    async def main() -> None:
        listener, dialer = End(dials=False), End(dials=True)
        async with connected(listener, dialer, partial(change, seen=[])):
            await until(lambda: listener.num_proved == dialer.num_proved == 1)
            dialer.connection.send("first")
            await until(lambda: listener.num_lost == 1)
        assert listener.got == ["first"] * num_heard

    asyncio.run(main())


@pytest.mark.parametrize(
    "words", [b"GET / HTTP/1.1\r\n\r\n", b"lmi copy, form 1" + bytes(32) + b"\x00\x00\xff\xff" * 9]
)
def test_other_protocols_and_long_frames_of_strangers_are_cut_off(words: bytes) -> None:
    async def main() -> None:
        listener = End(dials=False)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: listener.connection, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(words)
        await until(lambda: listener.num_lost == 1)
        assert listener.got == []
        with suppress(ConnectionError):
            await reader.read()
        writer.close()
        server.close()

    asyncio.run(main())
