"""Root mean square normalisation, one program per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmi_core.ops.device.quantized_rows import QuantizedRows, RowFormat
from lmi_core.ops.kernels.triton.row_codes import ELEMENTS, results_like, row_block, store_row


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
    y, places = results_like(x, num_columns, out_dtype, codes)
    if num_rows:
        _rms_norm_kernel[(num_rows,)](
            x,
            x if addend is None else addend,
            weight,
            *places,
            num_columns,
            eps,
            HAS_ADDEND=addend is not None,
            ELEMENT=ELEMENTS[out_dtype],
            CODES=codes or "",
            BLOCK=row_block(num_columns),
        )
    return y


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    addend_ptr,
    weight_ptr,
    y_ptr,
    row_codes_ptr,
    row_scales_ptr,
    outliers_ptr,
    stride,
    most_outliers,
    num_columns,
    eps,
    HAS_ADDEND: tl.constexpr,
    ELEMENT: tl.constexpr,
    CODES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    is_column = columns < num_columns
    row = tl.program_id(0).to(tl.int64)
    at = row * num_columns + columns
    x = tl.load(x_ptr + at, mask=is_column, other=0.0)
    if HAS_ADDEND:
        x += tl.load(addend_ptr + at, mask=is_column, other=0.0)
        tl.store(x_ptr + at, x, mask=is_column)
    weight = tl.load(weight_ptr + columns, mask=is_column, other=0.0)
    y = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / num_columns + eps)) * weight
    store_row(
        y,
        row,
        columns,
        num_columns,
        y_ptr,
        row_codes_ptr,
        row_scales_ptr,
        outliers_ptr,
        stride,
        most_outliers,
        ELEMENT,
        CODES,
    )
