"""Blocks of conversations that are kept for their next request, as far as nobody needs the room."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_core._native import BlockPool


class PinnedPrefixes:
    """Holds a reference of each block. Those of the conversation that was used least recently go
    first: where they are more than half of the pool, and wherever a sequence needs the room."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._max_blocks = pool.num_blocks // 2
        self._num_blocks = 0
        self._pinned: OrderedDict[str, list[int]] = OrderedDict()

    def pin(self, session: str, block_ids: list[int]) -> None:
        """Keep these used blocks, a conversation's from its beginning on, in the place of those
        that it had."""
        kept = block_ids[: self._max_blocks]
        self._pool.add_ref(kept)
        self.unpin(session)
        self._pinned[session] = kept
        self._num_blocks += len(kept)
        while self._num_blocks > self._max_blocks:
            self.unpin(next(iter(self._pinned)))

    def unpin(self, session: str) -> None:
        """Keep nothing for it any more. Idempotent."""
        block_ids = self._pinned.pop(session, [])
        self._num_blocks -= len(block_ids)
        self._pool.free(block_ids)

    def make_room(self, num_blocks: int) -> None:
        """Let go until so many are available, or nothing is kept."""
        while self._pinned and self._pool.num_available < num_blocks:
            self.unpin(next(iter(self._pinned)))

    def block_ids(self) -> Iterator[int]:
        """Each as often as it is kept."""
        return chain.from_iterable(self._pinned.values())
