"""Prefixes that come back from a disk into the block pool before their request is run."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from lmi_core.engine.disk_blocks import DiskBlocks
from lmi_core.runners.runner import BlockMemory

if TYPE_CHECKING:
    from lmi_core._native import BlockPool

_BLOCKS_PER_TURN = 8
"""So many are copied before the loop gets its turn."""
_READS_AT_ONCE = 4
"""Threads that read so many blocks each, ahead of the copying."""


class PrefixRestore:
    """Puts blocks that are on the disk into the pool, where they are cached like any others.

    Used in the loop's thread; only reading files and checking them happens in another one.
    """

    def __init__(self, pool: BlockPool, memory: BlockMemory, disk: DiskBlocks) -> None:
        self._pool = pool
        self._memory = memory
        self._disk = disk
        self._turn = asyncio.Lock()
        self.published: list[bytes] = []
        """Hashes of blocks that aren't on their way to the disk yet."""
        self.num_restored = 0
        """Blocks, so far."""

    def keep_published(self) -> None:
        """Have the blocks written that were published, but for those that were evicted
        meanwhile."""
        for block_hash in self.published:
            block_id = self._pool.find(block_hash)
            if block_id >= 0:
                self._disk.keep(block_hash, block_id)
        self.published.clear()

    def wanted(self, hashes: list[bytes]) -> int:
        """How many leading blocks there would be with what the disk has; 0: no more than now."""
        num_here = self._num_here(hashes)
        num_known = num_here
        while num_known < len(hashes) and self._disk.has(hashes[num_known]):
            num_known += 1
        return num_known if num_known > num_here else 0

    async def restore(self, hashes: list[bytes]) -> None:
        """Bring back the leading blocks of a prefix, as far as they are whole and there is room.
        One prefix at a time: the next one may be the same."""
        async with self._turn:
            hashes = hashes[: self.wanted(hashes)]
            num_here = self._num_here(hashes) if hashes else 0
            room = self._pool.num_available
            end = min(len(hashes), room)
            starts = range(num_here, end, _BLOCKS_PER_TURN)
            groups = [hashes[start : min(start + _BLOCKS_PER_TURN, end)] for start in starts]
            reads: deque[asyncio.Task[list[bytearray]]] = deque()
            try:
                for i, group in enumerate(groups):
                    for ahead in groups[i + len(reads) : i + _READS_AT_ONCE]:
                        read = asyncio.to_thread(self._disk.read, ahead)
                        reads.append(asyncio.create_task(read))
                    if not self._put(group, await reads.popleft()):
                        break
            finally:
                for task in reads:
                    task.cancel()
            # Used last as a whole, so that its tail goes before its head.
            self._num_here(hashes)

    def _put(self, hashes: list[bytes], contents: list[bytearray]) -> bool:
        """Cache blocks; whether all of them could be."""
        block_ids = self._pool.allocate(len(contents)) if contents else None
        if block_ids is None:
            return False
        try:
            for block_id, block_hash, content in zip(block_ids, hashes, contents, strict=False):
                self._memory.copy_in(block_id, content)
                self._pool.publish(block_id, block_hash)
        finally:
            self._pool.free(block_ids)
            self._disk.give_back(contents)
        self.num_restored += len(block_ids)
        return len(contents) == len(hashes)

    def _num_here(self, hashes: list[bytes]) -> int:
        """Leading blocks that the pool has, which count as used now."""
        block_ids = self._pool.acquire_prefix(hashes)
        self._pool.free(block_ids)
        return len(block_ids)
