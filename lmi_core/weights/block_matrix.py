"""A checkpoint's matrix in blocks of GGUF's types, as its file has it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lmi_core import _native
from lmi_core.weights.formats import BLOCK_FORMATS, BlockFormat, FloatArray
from lmi_core.weights.gguf.types import TYPES
from lmi_core.weights.integer_matrix import group_range

SUM_INPUTS = 16
"""Inputs of which quantised rows have a sum, for every type of blocks."""
_CHUNK_ROWS = 4096
_TYPES = {
    name: block for block in TYPES.values() for name in BLOCK_FORMATS if name == block.name.lower()
}


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """Codes and scales of blocks of neighbouring inputs."""

    format: BlockFormat
    shape: tuple[int, int]
    """Outputs and inputs."""
    blocks: npt.NDArray[np.uint8]
    """[outputs, bytes of a row]"""

    def __len__(self) -> int:
        return self.shape[0]

    def rows(self, rows: npt.NDArray[np.int64] | slice) -> BlockMatrix:
        """These of its outputs."""
        blocks = self.blocks[rows]
        return BlockMatrix(self.format, (len(blocks), self.shape[1]), blocks)

    def inputs(self, first: int, end: int) -> BlockMatrix:
        """These of its inputs; ValueError where they end within a block."""
        block = _TYPES[self.format]
        own = group_range(first, end, self.shape[1], block.num_weights)
        blocks = self.blocks[:, own.start * block.num_bytes : own.stop * block.num_bytes]
        return BlockMatrix(self.format, (len(self), end - first), np.ascontiguousarray(blocks))

    def to_float32(self) -> FloatArray:
        """The weights [outputs, inputs]."""
        values = np.empty(self.shape, np.float32)
        for first in range(0, len(self), _CHUNK_ROWS):
            rows = slice(first, first + _CHUNK_ROWS)
            part = [np.ascontiguousarray(self.blocks[rows])]
            packed = _native.LinearWeight.pack(part, format=self.format, group_size=SUM_INPUTS)
            values[rows] = packed.unpack()
        return values
