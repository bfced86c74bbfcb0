"""Events in portions, between which others get their turn: a slow reader's, or of many choices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing

from lmi_core.engine.outputs import TokenEvent

NumberedEvents = list[tuple[int, Sequence[TokenEvent]]]
"""Events by the number of their request."""

MOST = 4096
"""What rendering a portion costs, in likely tokens: some 10 ms."""
_EVENT_COST = 4


def portions(batch: NumberedEvents, most: int = MOST) -> Iterator[NumberedEvents]:
    """In their order; an event that costs more is one by itself. Events that came with something
    else, in more than a list, stay together."""
    portion: NumberedEvents = []
    cost = 0
    for index, events in batch:
        begin = 0
        for end, event in enumerate(events, 1):
            cost += _EVENT_COST + len(event.top)
            if cost >= most and (type(events) is list or end == len(events)):
                portion.append((index, events[begin:end] if end - begin < len(events) else events))
                yield portion
                portion, cost, begin = [], 0, end
        if begin < len(events):
            portion.append((index, events[begin:] if begin else events))
    if portion:
        yield portion


async def in_turns(
    batches: AsyncGenerator[NumberedEvents, None], most: int = MOST
) -> AsyncGenerator[NumberedEvents, None]:
    """Each portion in a turn of its own."""
    async with aclosing(batches):
        async for batch in batches:
            for i, portion in enumerate(portions(batch, most)):
                if i:
                    await asyncio.sleep(0)
                yield portion
