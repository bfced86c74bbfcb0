"""KV blocks of a model that ranks compute: each has those of its heads."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_core import _native
    from lmi_core.runners.cpu.ranks import Ranks


class RankedContent:
    """Implements ``BlockContent``: behind rank 0's part come the others' in their order."""

    def __init__(self, target: memoryview, others: list[Future[bytes]]) -> None:
        self._target = target
        self._others = others

    def result(self) -> None:
        size = len(self._target) // (len(self._others) + 1)
        for rank, other in enumerate(self._others, start=1):
            self._target[rank * size : (rank + 1) * size] = other.result()


class RankedBlocks:
    """Implements ``BlockMemory`` for all ranks of a model; ``own``: rank 0's."""

    def __init__(self, own: _native.KvCache, ranks: Ranks) -> None:
        self._own = own
        self._ranks = ranks

    @property
    def bytes_per_block(self) -> int:
        return self._own.bytes_per_block * self._ranks.num_ranks

    def copy_out(self, block_id: int, target: bytearray) -> RankedContent:
        others = self._ranks.order("copy_out", block_id)
        view = memoryview(target)
        self._own.copy_out(block_id, view[: self._own.bytes_per_block])
        return RankedContent(view, others)

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
