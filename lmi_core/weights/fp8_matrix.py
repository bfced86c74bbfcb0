"""A checkpoint's matrix in fp8: bytes, and what they are multiples of.

Format: TGI's sources, fp8. e4m3: a byte has a sign, four bits of exponent (bias 7) and three
of mantissa; 0x7f and 0xff are NaN, and nothing is infinite. e5m2: the upper byte of an fp16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from lmi_core.weights.formats import FloatArray
from lmi_core.weights.integer_matrix import group_range

FP8_BLOCK = 128
"""Outputs and inputs that a scale of a block stands for."""
FP8_MOST = 448.0
_CHUNK_ROWS = 64
_NAN = 0x7F
_BIAS = np.float32(2.0**120)
"""An fp8 exponent in fp32's place stands for this much less."""


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """weight = code * scale."""

    codes: npt.NDArray[np.uint8]
    """[outputs, inputs]"""
    scales: FloatArray
    """[outputs, 1], or [outputs, blocks of 128 inputs]"""
    format: Literal["e4m3", "e5m2"] = "e4m3"
    row_scale: float = 0.0
    """Of the rows that it is multiplied with where these become fp8, too; 0: each has its own."""

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def inputs(self, first: int, end: int) -> Fp8Matrix:
        """These of its inputs; ValueError where they end within a block."""
        has_blocks = self.scales.shape[1] > 1
        blocks = group_range(first, end, self.shape[1], FP8_BLOCK if has_blocks else 0)
        codes = np.ascontiguousarray(self.codes[:, first:end])
        return replace(self, codes=codes, scales=self.scales[:, blocks])

    def to_float32(self) -> FloatArray:
        """The weights [outputs, inputs]."""
        values = np.empty(self.shape, np.float32)
        for first in range(0, len(self), _CHUNK_ROWS):
            rows = slice(first, first + _CHUNK_ROWS)
            if self.format == "e4m3":
                _decode(self.codes[rows], values[rows])
            else:
                values[rows] = (self.codes[rows].astype(np.uint16) << 8).view(np.float16)
            scales = self.scales[rows]
            if scales.shape[1] > 1:
                scales = np.repeat(scales, FP8_BLOCK, axis=1)[:, : values.shape[1]]
            values[rows] *= scales
        return values


def expand_scales(scales: FloatArray, shape: tuple[int, ...]) -> FloatArray:
    """Scales of a matrix of ``shape`` (one, one per output, or one per block, as ``are_scales``
    wants them) as ``Fp8Matrix`` has them; of several in one tensor, one after the other."""
    if len(shape) > 2:
        if scales.size == 1:
            scales = np.broadcast_to(scales.reshape(1), shape[:1])
        return np.concatenate([expand_scales(np.asarray(own), shape[1:]) for own in scales])
    num_outputs = shape[0]
    if scales.size == 1:
        return np.broadcast_to(scales.reshape(1, 1), (num_outputs, 1))
    if scales.shape in ((num_outputs,), (num_outputs, 1)):
        return scales.reshape(num_outputs, 1)
    return np.repeat(scales, FP8_BLOCK, axis=0)[:num_outputs]


def common_row_scale(parts: Sequence[object]) -> float:
    """Of matrices whose products read the same rows: the one that clips the fewest; 0: each row has
    its own, as not all of them have one."""
    scales = [part.row_scale if isinstance(part, Fp8Matrix) else 0.0 for part in parts]
    return max(scales) if all(scales) else 0.0


def are_scales(scales: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether scales of shape ``scales`` go with a matrix of ``shape``, or with several."""
    *count, num_outputs, num_inputs = shape
    blocks = -(-num_outputs // FP8_BLOCK), -(-num_inputs // FP8_BLOCK)
    of_each: tuple[tuple[int, ...], ...] = ((num_outputs,), (num_outputs, 1), blocks)
    if count:
        of_each = ((), (1,), (1, 1), *of_each)
    return scales in ((), (1,), (1, 1), *((*count, *own) for own in of_each))


def encode_e4m3(values: FloatArray) -> npt.NDArray[np.uint8]:
    """The nearest codes, ties to even, of numbers up to 448, in their shape."""
    clipped = np.clip(values, -FP8_MOST, FP8_MOST).astype(np.float32)
    bits = (clipped * np.float32(1 / _BIAS)).view(np.uint32)
    magnitudes = bits & 0x7FFFFFFF
    rounded = (magnitudes + 0x7FFFF + (magnitudes >> 20 & 1)) >> 20
    codes = np.where(np.isnan(values), _NAN, rounded).astype(np.uint8)
    return codes | (bits >> 31 << 7).astype(np.uint8)


def _decode(codes: npt.NDArray[np.uint8], values: FloatArray) -> None:
    bits = codes.astype(np.uint32)
    signs = bits >> 7
    bits &= 0x7F
    is_nan = bits == _NAN
    bits <<= 20
    bits |= signs << 31
    np.multiply(bits.view(np.float32), _BIAS, out=values)
    if is_nan.any():
        values[is_nan] = np.nan
