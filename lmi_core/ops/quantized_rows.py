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
CODE_TYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""Of rows, by the format of the weights that they meet."""


class QuantizedRows(NamedTuple):
    """x = scale * code."""

    codes: Tensor
    """int8 or fp8 (e4m3) [R, columns and padding]."""
    scales: Tensor
    """fp32 [R]: the largest magnitude over the largest code; 0: all are zeros, NaN: not all is
    finite, and codes are 0 in both."""

    @staticmethod
    def empty_for(x: Tensor, format: Literal["int8", "fp8"]) -> QuantizedRows:
        """Room for rows of x [R, columns], which are to meet weights of ``format``."""
        stride = -(-x.shape[1] // CODE_STRIDE) * CODE_STRIDE
        return QuantizedRows(
            codes=torch.empty(len(x), stride, dtype=CODE_TYPES[format], device=x.device),
            scales=torch.empty(len(x), dtype=torch.float32, device=x.device),
        )
