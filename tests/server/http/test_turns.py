"""Of connections that are ready together, none is forgotten, and no turn of the loop has many."""

from __future__ import annotations

import asyncio
import socket

from lmi_server.http.turns import MOST_EVENTS, new_event_loop


def test_connections_that_are_ready_together_come_in_several_turns() -> None:
    """Those that stay ready keep no others from their turn."""
    pairs = [socket.socketpair() for _ in range(3 * MOST_EVENTS)]
    heard: list[list[int]] = [[]]

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def count() -> None:
            heard.append([])
            loop.call_soon(count)

        for number, (ours, theirs) in enumerate(pairs):
            theirs.send(b"x")
            loop.add_reader(ours, lambda number=number: heard[-1].append(number))
        count()
        while len(heard) < 20:  # noqa: ASYNC110 (turns are what is counted)
            await asyncio.sleep(0)
        for ours, _ in pairs:
            loop.remove_reader(ours)

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main())
    for each in (one for pair in pairs for one in pair):
        each.close()
    assert max(map(len, heard)) <= MOST_EVENTS
    counts = [sum(number in turn for turn in heard) for number in range(len(pairs))]
    assert min(counts) >= 3
    assert max(counts) - min(counts) <= 3
