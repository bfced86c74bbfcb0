"""Rows quantised each on its own, as products with int8 and fp8 weights take them."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

CODE_STRIDE = 128
"""LMI_CODE_STRIDE of csrc/cuda/lmi_cuda.h: rows of codes are padded with zeros to a multiple."""
LEAST_MAGNITUDE = 2.0**-100
"""Rows of less count as zeros, whose inverse would overflow."""
MOST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest code of each type, and what a row's largest magnitude becomes."""
RowFormat = Literal["int8", "fp8"]
CODE_TYPES: dict[RowFormat, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""Of rows, by the format of the weights that they meet."""


class QuantizedRows(NamedTuple):
    """x = scale * code."""

    codes: Tensor
    """int8 or fp8 (e4m3) [R, columns and padding]."""
    scales: Tensor
    """fp32 [R]: the largest magnitude over the largest code; 0: all are zeros, NaN: not all is
    finite, and codes are 0 in both."""

    @staticmethod
    def empty(
        num_rows: int, num_columns: int, format: RowFormat, device: torch.device
    ) -> QuantizedRows:
        """Room for rows that are to meet weights of ``format``."""
        stride = stride_of(num_columns)
        return QuantizedRows(
            codes=torch.empty(num_rows, stride, dtype=CODE_TYPES[format], device=device),
            scales=torch.empty(num_rows, dtype=torch.float32, device=device),
        )

    @staticmethod
    def empty_for(x: Tensor, format: RowFormat) -> QuantizedRows:
        """The same for rows of x [R, columns]."""
        return QuantizedRows.empty(len(x), x.shape[1], format, x.device)


def stride_of(num_columns: int) -> int:
    """Codes in a row, with those that pad it."""
    return -(-num_columns // CODE_STRIDE) * CODE_STRIDE
