"""A step's inputs on a device, uploaded in one copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from lmi_core.ops.device.step_arrays import IntArray, StepArrays

QUERY_TILE = 16
"""Token rows of a tile of a prefill, where a kernel doesn't want others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStep:
    """``StepArrays`` as int32 tensors, named alike; ``host`` holds the same values."""

    host: StepArrays
    block_size: int
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    first_rows: Tensor
    num_rows: Tensor
    kv_lengths: Tensor
    block_tables: Tensor
    """[num_seqs, blocks of the longest sequence]."""
    logit_token_rows: Tensor
    copy_src: Tensor
    copy_dst: Tensor
    single_seqs: Tensor
    """Sequences with one row."""
    query_tiles: Tensor
    """[num_tiles, 2]: sequence, and first row within it, of tiles of QUERY_TILE rows; those of
    sequences with more than one row."""
    is_refilled: bool = False
    """The tensors stay where they are and get other steps' values (``DecodeStep``), of up to the
    lengths in ``host``."""
    derived: dict[object, object] = field(default_factory=dict, init=False)
    """What an implementation of an op worked out for this step, for its next calls; where
    ``is_refilled``, each has ``decode_step.Refreshed.refresh``."""

    @classmethod
    def upload(cls, arrays: StepArrays, *, block_size: int, device: torch.device) -> DeviceStep:
        host = {
            "single_seqs": np.flatnonzero(arrays.num_rows == 1).astype(np.int32),
            "query_tiles": _query_tiles(arrays.num_rows, QUERY_TILE),
        }
        for array in fields(StepArrays):
            if array.name in cls.__slots__:
                host[array.name] = getattr(arrays, array.name)
        return cls(host=arrays, block_size=block_size, is_refilled=False, **_upload(host, device))

    def tiles_of(self, size: int) -> Tensor:
        """As ``query_tiles``, of ``size`` rows; worked out once a step."""
        if size == QUERY_TILE or len(self.query_tiles) == 0:
            return self.query_tiles
        key = ("query tiles", size)
        if key not in self.derived:
            tiles = _upload(
                {"tiles": _query_tiles(self.host.num_rows, size)}, self.positions.device
            )
            self.derived[key] = tiles["tiles"]
        return cast(Tensor, self.derived[key])

    def single_rows(self) -> Iterator[DeviceStep]:
        """Steps of one token row each, in order: as if every token came by itself."""
        device = self.token_ids.device
        host = self.host
        for seq in range(len(host.num_rows)):
            first = int(host.first_rows[seq])
            for row in range(first, first + int(host.num_rows[seq])):
                arrays = host.row(seq, row)
                step = DeviceStep.upload(arrays, block_size=self.block_size, device=device)
                # The host may not know the token yet.
                yield replace(step, token_ids=self.token_ids[row : row + 1])

    def sequences(self) -> Iterator[DeviceStep]:
        """Steps of one whole sequence each, in order: as if every sequence came by itself."""
        for seq in range(len(self.host.num_rows)):
            arrays = self.host.sequence(seq)
            yield DeviceStep.upload(
                arrays, block_size=self.block_size, device=self.token_ids.device
            )


def _query_tiles(num_rows: IntArray, size: int) -> IntArray:
    tiles = [
        (seq, start)
        for seq, count in enumerate(num_rows.tolist())
        if count > 1
        for start in range(0, count, size)
    ]
    return np.array(tiles, np.int32).reshape(-1, 2)


def _upload(arrays: dict[str, IntArray], device: torch.device) -> dict[str, Tensor]:
    """Views of one device buffer; kernels want each to start on 16 bytes."""
    sizes = {name: -(-array.size // 4) * 4 for name, array in arrays.items()}
    staging = torch.empty(sum(sizes.values()), dtype=torch.int32, pin_memory=device.type == "cuda")
    offset, offsets = 0, {}
    for name, array in arrays.items():
        offsets[name] = offset
        staging[offset : offset + array.size] = torch.from_numpy(array.ravel())
        offset += sizes[name]
    buffer = staging.to(device, non_blocking=True)
    return {
        name: buffer[offsets[name] : offsets[name] + array.size].view(array.shape)
        for name, array in arrays.items()
    }
