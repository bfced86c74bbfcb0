"""A checkpoint's matrix in int4 or int8: codes, and what they are multiples of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from lmi_core.weights.formats import FloatArray, RowRounding

IntegerFormat = Literal["int8", "int4"]
INT8_ZERO = 128
"""What the codes of int8 are more than the numbers that they stand for."""


def group_range(first: int, end: int, num_inputs: int, group_size: int) -> slice:
    """The groups of inputs from ``first`` up to ``end``; 0: one of all. ValueError for a part of
    one."""
    if group_size == 0:
        return slice(None)
    if first % group_size or (end % group_size and end != num_inputs):
        raise ValueError(f"inputs {first} to {end} aren't whole groups of {group_size}")
    return slice(first // group_size, -(-end // group_size))


@dataclass(frozen=True, slots=True)
class Codes:
    """weight = scale * (code - zero point), of a group of inputs each."""

    codes: npt.NDArray[np.uint8]
    """[outputs, inputs]"""
    scales: FloatArray
    """[outputs, groups]; of int4, numbers that fp16 holds"""
    zeros: FloatArray
    """[outputs, groups]; of int8 all 128"""


@dataclass(frozen=True, slots=True)
class IntegerMatrix:
    """Codes that are unpacked only when they are asked for: a matrix that was packed before isn't
    read at all."""

    format: IntegerFormat
    shape: tuple[int, int]
    group_size: int
    """Inputs per scale, a power of two from 32 to 128; 0: a scale per output (int8)."""
    unpack: Callable[[], Codes]
    rounding: RowRounding | None = None
    """Of the rows that it is multiplied with, by its scheme; None: that says nothing."""
    order: npt.NDArray[np.int32] | None = None
    """Which of a row's inputs each of the codes' is, where groups have inputs from all over; None:
    the same one."""

    def __len__(self) -> int:
        return self.shape[0]

    def rows(self, rows: npt.NDArray[np.int64] | slice) -> IntegerMatrix:
        """These of its outputs."""

        def unpack() -> Codes:
            matrix = self.unpack()
            return Codes(matrix.codes[rows], matrix.scales[rows], matrix.zeros[rows])

        num_outputs = len(np.arange(len(self))[rows])
        return replace(self, shape=(num_outputs, self.shape[1]), unpack=unpack)

    def inputs(self, first: int, end: int) -> IntegerMatrix:
        """These of its inputs; ValueError where they end within a group, or aren't neighbours."""
        if self.order is not None:
            raise ValueError("its inputs are in another order")
        groups = group_range(first, end, self.shape[1], self.group_size)

        def unpack() -> Codes:
            matrix = self.unpack()
            scales, zeros = (values[:, groups] for values in (matrix.scales, matrix.zeros))
            codes = np.ascontiguousarray(matrix.codes[:, first:end])
            return Codes(codes, np.ascontiguousarray(scales), np.ascontiguousarray(zeros))

        return replace(self, shape=(self.shape[0], end - first), unpack=unpack)

    def packable(self, group_size: int) -> tuple[npt.NDArray[np.uint8], FloatArray, FloatArray]:
        """As ``_native.LinearWeight.pack`` takes it, in groups of ``group_size``, which divides its
        own."""
        matrix = self.unpack()
        scales = self._of_groups(matrix.scales, group_size)
        return matrix.codes, scales, self._of_groups(matrix.zeros, group_size)

    def to_float32(self) -> FloatArray:
        """The weights [outputs, inputs]."""
        matrix = self.unpack()
        scales, zeros = (
            np.repeat(of_groups, self.group_size or self.shape[1], axis=1)[:, : self.shape[1]]
            for of_groups in (matrix.scales, matrix.zeros)
        )
        weights = matrix.codes.astype(np.float32)
        weights -= zeros
        weights *= scales
        if self.order is None:
            return weights
        in_order = np.empty_like(weights)
        in_order[:, self.order] = weights
        return in_order

    def _of_groups(self, values: FloatArray, group_size: int) -> FloatArray:
        if group_size != self.group_size:
            num_groups = -(-self.shape[1] // group_size)
            values = np.repeat(values, self.group_size // group_size, axis=1)[:, :num_groups]
        return np.ascontiguousarray(values, np.float32)
