"""Rows quantised each on its own, as products with int8 weights take them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CODE_STRIDE = 128
"""LMI_CODE_STRIDE of csrc/cuda/lmi_cuda.h: rows of codes are padded with zeros to a multiple."""
INT8_MOST = 127
LEAST_MAGNITUDE = 2.0**-100
"""Rows of less count as zeros, whose inverse would overflow."""


class QuantizedRows(NamedTuple):
    """x = scale * code."""

    codes: Tensor
    """int8 [R, columns and padding]."""
    scales: Tensor
    """fp32 [R]: the largest magnitude's 127th part; 0: all are zeros, NaN: not all is finite, and
    codes are 0 in both."""

    @staticmethod
    def empty_for(x: Tensor) -> QuantizedRows:
        """Room for rows of x [R, columns]."""
        stride = -(-x.shape[1] // CODE_STRIDE) * CODE_STRIDE
        return QuantizedRows(
            codes=torch.empty(len(x), stride, dtype=torch.int8, device=x.device),
            scales=torch.empty(len(x), dtype=torch.float32, device=x.device),
        )
