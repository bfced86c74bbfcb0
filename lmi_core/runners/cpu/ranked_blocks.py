"""KV blocks of a model that ranks compute: each has those of its heads."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_core import _native
    from lmi_core.runners.cpu.ranks import Ranks


class RankedContent:
    """Implements ``BlockContent``: rank 0's part, and the others' in their order."""

    def __init__(self, own: bytes, others: list[Future[bytes]]) -> None:
        self._own = own
        self._others = others

    def result(self) -> bytes:
        return b"".join([self._own, *(other.result() for other in self._others)])


class RankedBlocks:
    """Implements ``BlockMemory`` for all ranks of a model; ``own``: rank 0's."""

    def __init__(self, own: _native.KvCache, ranks: Ranks) -> None:
        self._own = own
        self._ranks = ranks

    def copy_out(self, block_id: int) -> RankedContent:
        others = self._ranks.order("copy_out", block_id)
        return RankedContent(self._own.copy_out(block_id), others)

    def copy_in(self, block_id: int, content: bytes) -> None:
        size = len(content) // self._ranks.num_ranks
        self._own.copy_in(block_id, content[:size])
        self._ranks.order_each(
            "copy_in",
            [
                (block_id, content[first : first + size])
                for first in range(size, len(content), size)
            ],
        )
