"""The inputs of decode steps at fixed places on a device, as captured kernels read them."""

from __future__ import annotations

from typing import Protocol, cast

import numpy as np
import torch

from lmi_core.ops.device.device_step import DeviceStep
from lmi_core.ops.device.step_arrays import IntArray, StepArrays

_NUM_ARRAYS = 4
"""Token ids, positions, slots and KV lengths; the block tables follow."""


class Refreshed(Protocol):
    """What an op worked out for a step (``DeviceStep.derived``) and keeps in fixed places."""

    def refresh(self, host: StepArrays) -> None:
        """Work it out anew for a step with other lengths."""
        ...


class DecodeStep:
    """Room for ``num_rows`` sequences with one row and up to ``num_keys`` keys each.

    Rows that a step leaves free compute token 0 over one key in ``scratch_block``, which belongs to
    no sequence.
    """

    def __init__(
        self,
        num_rows: int,
        num_keys: int,
        *,
        block_size: int,
        scratch_block: int,
        device: torch.device,
    ) -> None:
        self.num_rows, self.num_keys = num_rows, num_keys
        self._num_columns = -(-num_keys // block_size)
        self._block_size, self._scratch_block = block_size, scratch_block
        self._device = device
        self._stride = -(-num_rows // 4) * 4  # each array starts on 16 bytes
        num_values = _NUM_ARRAYS * self._stride + num_rows * self._num_columns
        self._values = torch.zeros(num_values, dtype=torch.int32, device=device)
        views = self._split(self._values)
        rows = torch.arange(num_rows, dtype=torch.int32, device=device)
        empty = rows[:0]
        self.step = DeviceStep(
            host=self._host(np.full(num_rows, num_keys, np.int32)),
            block_size=block_size,
            token_ids=views[0],
            positions=views[1],
            slots=views[2],
            kv_lengths=views[3],
            block_tables=views[4],
            first_rows=rows,
            num_rows=torch.ones_like(rows),
            logit_token_rows=rows,
            copy_src=empty,
            copy_dst=empty,
            single_seqs=rows,
            query_tiles=empty.view(0, 2),
            is_refilled=True,
        )
        self.clear()

    def clear(self) -> None:
        """All rows free."""
        self._fill(None)

    def fill(self, arrays: StepArrays) -> None:
        """Take over a step of single rows that fits, in one upload."""
        self._fill(arrays)

    def _fill(self, arrays: StepArrays | None) -> None:
        staging = torch.zeros(
            self._values.numel(), dtype=torch.int32, pin_memory=self._device.type == "cuda"
        )
        token_ids, positions, slots, lengths, tables = (
            view.numpy() for view in self._split(staging)
        )
        slots[:] = self._scratch_block * self._block_size
        lengths[:] = 1
        tables[:] = self._scratch_block
        if arrays is not None:
            count = len(arrays.token_ids)
            token_ids[:count] = arrays.token_ids
            positions[:count] = arrays.positions
            slots[:count] = arrays.slots
            lengths[:count] = arrays.kv_lengths
            tables[:count, : arrays.block_tables.shape[1]] = arrays.block_tables
        self._values.copy_(staging, non_blocking=True)
        if self.step.derived:
            host = self._host(lengths)
            for derived in self.step.derived.values():
                cast(Refreshed, derived).refresh(host)

    def _split(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        starts = [i * self._stride for i in range(_NUM_ARRAYS)]
        arrays = [values[start : start + self.num_rows] for start in starts]
        tables = values[_NUM_ARRAYS * self._stride :]
        return *arrays, tables.view(self.num_rows, self._num_columns)

    def _host(self, kv_lengths: IntArray) -> StepArrays:
        rows = np.arange(self.num_rows, dtype=np.int32)
        zeros, empty = np.zeros_like(rows), rows[:0]
        return StepArrays(
            token_ids=zeros,
            positions=zeros,
            slots=zeros,
            first_rows=rows,
            num_rows=np.ones_like(rows),
            kv_lengths=kv_lengths,
            table_rows=rows,
            block_tables=np.zeros((self.num_rows, self._num_columns), np.int32),
            logit_token_rows=rows,
            sampling_rows=empty,
            target_ids=empty,
            copy_src=empty,
            copy_dst=empty,
        )
