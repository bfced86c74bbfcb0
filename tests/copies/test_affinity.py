"""What conversations find in the prefix caches of copies, beside one cache with as much memory.

Without engines, in a time of its own: histories of the same conversations differ by 3 % in this.
"""

from __future__ import annotations

import heapq
import random
import statistics
from collections import OrderedDict

import pytest

from lmi_core.copies.router import AFFINITY, Entry, Router

BLOCK, NUM_COPIES, NUM_CONVERSATIONS, NUM_TURNS = 16, 4, 64, 6
FIRST, GENERATED, ADDED = 96, 24, 40
"""Tokens: of the first prompt, of an answer, of an answer and what is said to it."""


class Cache:
    """The blocks that were used last."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def use(self, hashes: list[bytes]) -> int:
        """How many leading ones are there; then all are, heads evicted after tails."""
        is_there = [one in self._blocks for one in hashes] + [False]
        for one in reversed(hashes):
            self._blocks[one] = None
            self._blocks.move_to_end(one)
        while len(self._blocks) > self._num_blocks:
            self._blocks.popitem(last=False)
        return is_there.index(False)


def hit_rate(num_copies: int, affinity: int, seed: int, num_blocks: int) -> float:
    """Of the prompts' tokens, ``num_blocks`` in all copies together."""
    router, chance = Router(BLOCK, affinity), random.Random(seed)
    caches = [Cache(num_blocks // num_copies) for _ in range(num_copies)]
    for copy_id in range(num_copies):
        router.add_copy(copy_id, room=80 // num_copies, num_blocks=num_blocks // num_copies)
    num_prompt = num_cached = 0
    turns = [0] * NUM_CONVERSATIONS
    events: list[tuple[float, int, Entry | None]] = [
        (chance.random(), number, None) for number in range(NUM_CONVERSATIONS)
    ]
    heapq.heapify(events)

    def hashes(number: int, num_tokens: int) -> list[bytes]:
        return [b"%d %d" % (number, i) for i in range((num_tokens - 1) // BLOCK)]

    while events:
        now_s, number, ended = heapq.heappop(events)
        num_tokens = FIRST + ADDED * turns[number]
        if ended is None:
            router.put(
                Entry(
                    number,
                    num_prompt_tokens=num_tokens,
                    num_output_tokens=GENERATED,
                    hashes=hashes(number, num_tokens),
                )
            )
        else:
            left = hashes(number, num_tokens + GENERATED)
            caches[ended.copy_id or 0].use(left)
            router.finish(ended, left)
            turns[number] += 1
            if turns[number] < NUM_TURNS:
                heapq.heappush(events, (now_s + chance.random(), number, None))
        for entry, copy_id in router.assign():
            num_prompt += entry.num_prompt_tokens
            num_cached += BLOCK * caches[copy_id].use(list(entry.hashes))
            takes_s = 0.3 + 0.2 * chance.random()
            heapq.heappush(events, (now_s + takes_s, entry.number, entry))
    return num_cached / num_prompt


@pytest.mark.parametrize("num_blocks", [480, 800, 1200])
def test_copies_find_what_one_cache_of_their_memory_would_hold(num_blocks: int) -> None:
    """Where a third, three quarters and all of what was computed is still there."""

    seeds = range(4)
    whole = [hit_rate(1, AFFINITY, seed, num_blocks) for seed in seeds]

    def share(affinity: int) -> float:
        parts = [hit_rate(NUM_COPIES, affinity, seed, num_blocks) for seed in seeds]
        return statistics.mean(own / all_ for own, all_ in zip(parts, whole, strict=True))

    assert share(AFFINITY) >= 0.95
    assert share(1) < 0.9
