"""Nodes of heads that draft: rows that are kept by slot, and columns of a smaller vocabulary."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lmi_core.ops.device.kept_table import KeptTable
from lmi_core.ops.device.paged_cache import PagedCache
from lmi_core.ops.device.replay import Replay
from lmi_core.ops.graph import Handle

UNLIKELY = -1e30
"""The logit of tokens that a smaller vocabulary lacks."""


class KeptNodes:
    """Methods of an ``EagerGraph``."""

    _caches: list[PagedCache | KeptTable]
    """Of which blocks are copied with a step's."""

    def _kept_rows(self, y: Handle, *, table: KeptTable) -> Callable[[Replay], Tensor]:
        return lambda replay: table.rows[replay.step.slots].float()

    def _keep_rows(self, y: None, x: Handle, *, table: KeptTable) -> Callable[[Replay], None]:
        are_tokens = x.rows == "T"
        if are_tokens and table not in self._caches:
            self._caches.append(table)
        return lambda replay: table.keep(replay[x], replay.step, are_tokens=are_tokens)

    def _spread_columns(
        self, y: Handle, x: Handle, *, columns: Tensor, num_columns: int
    ) -> Callable[[Replay], Tensor]:
        ids = columns.long()

        def spread(replay: Replay) -> Tensor:
            logits = replay[x]
            wide = logits.new_full((len(logits), num_columns), UNLIKELY)
            wide[:, ids] = logits
            return wide

        return spread
