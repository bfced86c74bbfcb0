"""Messages that came together are handed over in turns of the loop."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

from lmi_core.copies.connection import Connection


def test_a_backlog_leaves_turns_to_others_and_arrives_whole() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        heard: list[Any] = []
        between: list[int] = []
        lost = asyncio.Event()

        def hear(value: Any) -> None:
            assert not lost.is_set()
            if not heard:
                loop.call_soon(tick)
            heard.append(value)
            time.sleep(0.0005)

        def tick() -> None:
            between.append(len(heard))
            if not lost.is_set():
                loop.call_soon(tick)

        ours, theirs = socket.socketpair()
        _, sender = await loop.create_connection(
            lambda: Connection(lambda _: None, lambda: None), sock=theirs
        )
        for number in range(200):
            sender.send(number)
        sender.close()
        await asyncio.sleep(0.01)
        await loop.create_connection(lambda: Connection(hear, lost.set), sock=ours)
        await asyncio.wait_for(lost.wait(), 10)
        assert heard == list(range(200))
        assert len(set(between)) >= 5

    asyncio.run(main())


def test_what_cannot_be_taken_ends_a_backlog() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        said: list[str] = []
        loop.set_exception_handler(lambda _, context: said.append(str(context["exception"])))
        heard: list[Any] = []
        lost = asyncio.Event()

        def hear(value: Any) -> None:
            heard.append(value)
            time.sleep(0.001)
            if value >= 20:
                raise ValueError("broken")

        ours, theirs = socket.socketpair()
        _, sender = await loop.create_connection(
            lambda: Connection(lambda _: None, lambda: None), sock=theirs
        )
        for number in range(200):
            sender.send(number)
        await asyncio.sleep(0.01)
        await loop.create_connection(lambda: Connection(hear, lost.set), sock=ours)
        await asyncio.wait_for(lost.wait(), 10)
        assert (heard, said) == (list(range(21)), ["broken"])
        sender.close()

    asyncio.run(main())
