"""A matrix in bitsandbytes' 4 bits: codes of floats, and a scale for every 64 weights.

Format: TGI's sources, bitsandbytes. A block is 64 neighbours of the matrix read row by row,
so that it may begin in one row and end in the next; a byte holds two codes, the first in its upper
half. The numbers that codes stand for: QLoRA (arXiv 2305.14314) for NF4, bitsandbytes for FP4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from lmi_core.weights.formats import FloatArray
from lmi_core.weights.integer_matrix import group_range

FloatCodeFormat = Literal["nf4", "fp4"]
CODE_BLOCK = 64
"""Neighbours of one scale."""
_FP4 = [each / 12 for each in (0, 0.0625, 8, 12, 4, 6, 2, 3)]
CODE_VALUES: dict[FloatCodeFormat, FloatArray] = {
    "nf4": np.array(
        [
            *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
            *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
            *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
            *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
        ],
        np.float32,
    ),
    "fp4": np.array([*_FP4, *(-each for each in _FP4)], np.float32),
}
"""By code."""
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class FloatCodeMatrix:
    """weight = scale * value of the code; read only when it is asked for."""

    format: FloatCodeFormat
    shape: tuple[int, int]
    unpack: Callable[[], tuple[Bytes, FloatArray]]
    """Codes, two a byte, and scales, of the matrix as one row."""
    chosen: npt.NDArray[np.int64] | None = None
    """Its outputs among those of ``unpack``; None: all of them."""

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def has_whole_blocks(self) -> bool:
        """Whether no scale is of two rows."""
        return self.shape[1] % CODE_BLOCK == 0

    def rows(self, rows: npt.NDArray[np.int64] | slice) -> FloatCodeMatrix:
        """These of its outputs."""
        chosen = (np.arange(len(self)) if self.chosen is None else self.chosen)[rows]
        return replace(self, shape=(len(chosen), self.shape[1]), chosen=chosen)

    def inputs(self, first: int, end: int) -> FloatCodeMatrix:
        """These of its inputs; ValueError where they end within a block."""
        num_inputs = self.shape[1]
        if not self.has_whole_blocks:
            raise ValueError(f"blocks of {CODE_BLOCK} go on in the next of {num_inputs} inputs")
        blocks = group_range(first, end, num_inputs, CODE_BLOCK)

        def unpack() -> tuple[Bytes, FloatArray]:
            codes, scales = self.unpack()
            own = codes.reshape(-1, num_inputs // 2)[:, first // 2 : end // 2]
            return own.ravel(), scales.reshape(-1, num_inputs // CODE_BLOCK)[:, blocks].ravel()

        return replace(self, shape=(self.shape[0], end - first), unpack=unpack)

    def packable(self) -> tuple[Bytes, FloatArray]:
        """As ``_native.LinearWeight.pack`` takes it, of rows in whole blocks."""
        codes, scales = self.unpack()
        num_inputs = self.shape[1]
        codes = codes.reshape(-1, num_inputs // 2)
        scales = scales.reshape(-1, num_inputs // CODE_BLOCK)
        if self.chosen is not None:
            codes, scales = codes[self.chosen], scales[self.chosen]
        return np.ascontiguousarray(codes), np.ascontiguousarray(scales)

    def to_float32(self) -> FloatArray:
        """The weights [outputs, inputs]."""
        codes, scales = self.unpack()
        pairs = np.stack([codes >> 4, codes & 15], axis=1)
        values = CODE_VALUES[self.format][pairs.ravel()]
        values *= np.repeat(scales, CODE_BLOCK)[: len(values)]
        num_weights = len(values) // self.shape[1] * self.shape[1]
        weights = values[:num_weights].reshape(-1, self.shape[1])
        # Where rows are shorter than a block, its rest can be rows, too.
        return weights[: len(self)] if self.chosen is None else weights[self.chosen]


def to_float_codes(weights: FloatArray, format: FloatCodeFormat) -> FloatCodeMatrix:
    """``weights`` [outputs, inputs] as bitsandbytes quantises them: a block's scale is its largest
    magnitude, a code the nearest."""
    num_weights = weights.size

    def unpack() -> tuple[Bytes, FloatArray]:
        flat = np.zeros(-(-num_weights // CODE_BLOCK) * CODE_BLOCK, np.float32)
        flat[:num_weights] = weights.ravel()
        blocks = flat.reshape(-1, CODE_BLOCK)
        scales = np.abs(blocks).max(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            blocks *= np.where(scales > 0, np.float32(1) / scales, 0)[:, None]
        values = CODE_VALUES[format]
        order = np.argsort(values, kind="stable")
        middles = (values[order][1:] + values[order][:-1]) / 2
        codes = order[np.searchsorted(middles, blocks.ravel())].astype(np.uint8)
        pairs: Bytes = np.bitwise_or(codes[0::2] << np.uint8(4), codes[1::2], dtype=np.uint8)
        return pairs, scales

    return FloatCodeMatrix(format, (weights.shape[0], weights.shape[1]), unpack)
