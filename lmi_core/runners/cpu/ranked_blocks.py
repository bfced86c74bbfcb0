"""KV blocks of a model that ranks compute: each has those of its heads."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_core import _native
    from lmi_core.runners.cpu.ranks import Ranks


class RankedBlocks:
    """Implements ``BlockMemory`` for all ranks of a model; ``own``: rank 0's. Behind rank 0's part
    of a block come the others' in their order."""

    def __init__(self, own: _native.KvCache, ranks: Ranks) -> None:
        self._own = own
        self._ranks = ranks

    @property
    def bytes_per_block(self) -> int:
        return self._own.bytes_per_block * self._ranks.num_ranks

    def write_out(self, writer: _native.BlockWriter, name: str, block_id: int) -> None:
        size = self._own.bytes_per_block
        content = bytearray(self.bytes_per_block)
        others = self._ranks.order("copy_out", block_id)
        self._own.copy_out(block_id, memoryview(content)[:size])

        def put(rank: int, other: Future[bytes]) -> None:
            try:
                content[rank * size : (rank + 1) * size] = other.result()
                if rank < len(others):
                    others[rank].add_done_callback(partial(put, rank + 1))
                else:
                    writer.write(name, content)
            except Exception:  # whatever it was, the block isn't there
                writer.give_up(name)

        others[0].add_done_callback(partial(put, 1))

    def copy_in(self, block_id: int, content: bytearray) -> None:
        size = self._own.bytes_per_block
        self._own.copy_in(block_id, content[:size])
        self._ranks.order_each(
            "copy_in",
            [
                (block_id, bytes(content[first : first + size]))
                for first in range(size, len(content), size)
            ],
        )
