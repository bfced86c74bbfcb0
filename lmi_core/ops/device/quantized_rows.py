"""Rows quantised each on its own, as products with int8 and fp8 weights take them.

``RowRounding`` of csrc/cpu/packed_linear.h has the rule for outliers, the same on every device.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

CODE_STRIDE = 128
"""LMI_CODE_STRIDE of csrc/cuda/lmi_products.h: zeros fill up rows of codes to a multiple."""
LEAST_MAGNITUDE = 2.0**-100
"""Rows of less count as zeros, whose inverse would overflow."""
MOST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest code of each type, and what a row's largest magnitude becomes."""
RowKind = Literal["int8", "outliers", "fp8"]
"""outliers: int8, but a row's few largest numbers in 16 bits."""
CODE_TYPES: dict[RowKind, torch.dtype] = {
    "int8": torch.int8,
    "outliers": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
OCTAVES = (3, 4, 5, 6, 7, 8, 9)
"""From a row's largest magnitude down to what at most ``max_outliers`` may reach."""


class StaticFp8(NamedTuple):
    """fp8 by one scale for all rows, of which what is larger than 448 scales becomes these."""

    scale: float


RowFormat = RowKind | StaticFp8
"""Each row has a scale of its own, but for ``StaticFp8``."""


def kind_of(format: RowFormat) -> RowKind:
    return "fp8" if isinstance(format, StaticFp8) else format


def fixed_scale(format: RowFormat) -> float:
    """Of all rows; 0: each has its own."""
    return format.scale if isinstance(format, StaticFp8) else 0.0


class QuantizedRows(NamedTuple):
    """x = scale * code, of outliers scale * (code + 256 high)."""

    codes: Tensor
    """int8 or fp8 (e4m3) [R, columns and padding]."""
    scales: Tensor
    """fp32 [R]: the largest magnitude over the largest code, of outliers the largest below, or what
    ``StaticFp8`` says; 0: all are zeros, NaN: not all is finite, and codes are 0 in both."""
    outliers: Tensor | None = None
    """int32 [R, 1 + ``max_outliers``]: how many numbers of a row have a high digit that isn't 0;
    column << 8 | high as a byte of each, in any order; anything. None: the format has none."""

    @staticmethod
    def empty(
        num_rows: int, num_columns: int, format: RowFormat, device: torch.device
    ) -> QuantizedRows:
        """Room for rows that are to meet weights of ``format``."""
        stride = stride_of(num_columns)
        return QuantizedRows(
            codes=torch.empty(num_rows, stride, dtype=CODE_TYPES[kind_of(format)], device=device),
            scales=torch.empty(num_rows, dtype=torch.float32, device=device),
            outliers=None
            if format != "outliers"
            else torch.empty(
                num_rows, 1 + max_outliers(num_columns), dtype=torch.int32, device=device
            ),
        )

    @staticmethod
    def empty_for(x: Tensor, format: RowFormat) -> QuantizedRows:
        """The same for rows of x [R, columns]."""
        return QuantizedRows.empty(len(x), x.shape[1], format, x.device)


def max_outliers(num_columns: int) -> int:
    """Of a row."""
    return num_columns // 32


def stride_of(num_columns: int) -> int:
    """Codes in a row, with those that pad it."""
    return -(-num_columns // CODE_STRIDE) * CODE_STRIDE
