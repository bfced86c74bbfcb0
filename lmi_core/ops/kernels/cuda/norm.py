"""Root mean square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor

from lmi_core.ops.device.quantized_rows import QuantizedRows, RowFormat
from lmi_core.ops.kernels.cuda import library
from lmi_core.ops.kernels.cuda.results import results_like
from lmi_core.ops.kernels.fallback import fallback

MAX_COLUMNS = 16384
"""LMI_MAX_NORM_COLUMNS; a quarter of it for rows that are no multiple of 4."""


def most_columns(num_columns: int) -> int:
    """The most columns of rows of which these are a multiple, or no multiple, of 4."""
    return MAX_COLUMNS if num_columns % 4 == 0 else MAX_COLUMNS // 4


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    out_dtype: torch.dtype,
    addend: Tensor | None = None,
    codes: RowFormat | None = None,
) -> Tensor | QuantizedRows:
    """x / sqrt(mean(x^2) + eps) * weight, fp32 [R, n] -> [R, n]; ``addend`` is added to x first,
    in place. ``codes``: the result, rounded to ``out_dtype``, quantised for such weights."""
    num_rows, num_columns = x.shape
    if num_columns > most_columns(num_columns):
        other = fallback("rms_norm", x.device, f"rows of {num_columns} columns")
        result: Tensor | QuantizedRows = other(
            x, weight, eps, out_dtype=out_dtype, addend=addend, codes=codes
        )
        return result
    y, named = results_like(x, num_columns, out_dtype, codes)
    library.call(
        "rms_norm",
        x,
        x=x,
        addend=addend,
        weight=weight,
        num_rows=num_rows,
        num_columns=num_columns,
        eps=eps,
        y_dtype=out_dtype,
        **named,
    )
    return y
