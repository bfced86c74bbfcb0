"""Rows that a device keeps by slot from step to step, for a head that drafts."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lmi_core.ops.device.device_step import DeviceStep


class KeptTable:
    """``rows`` [slots, columns] of a cache's blocks."""

    def __init__(
        self, num_columns: int, dtype: torch.dtype, device: torch.device, block_size: int
    ) -> None:
        self.num_columns = num_columns
        self.block_size = block_size
        self.rows = torch.zeros(0, num_columns, dtype=dtype, device=device)
        self.resize(1)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), self.num_columns

    @property
    def num_bytes(self) -> int:
        return self.rows.nbytes

    def resize(self, num_blocks: int) -> None:
        """Room for so many blocks, of new content."""
        self.rows = self.rows.new_zeros(num_blocks * self.block_size, self.num_columns)

    def copy_blocks(self, src: Tensor, dst: Tensor) -> None:
        """Copy whole blocks; none is both read and written."""
        blocks = self.rows.view(-1, self.block_size, self.num_columns)
        blocks[dst] = blocks[src]

    def keep(self, rows: Tensor, step: DeviceStep, *, are_tokens: bool) -> None:
        """A row for each of the step's tokens, or for each logit row, which goes into the slot of
        the position behind its own."""
        slots = step.slots if are_tokens else self._next_slots(step)
        self.rows[slots.long()] = rows.to(self.rows.dtype)

    def _next_slots(self, step: DeviceStep) -> Tensor:
        host = step.host
        rows = host.logit_token_rows
        slots = host.slots_at(rows, host.positions[rows] + 1, self.block_size)
        return torch.from_numpy(slots.astype(np.int64)).to(self.rows.device)
