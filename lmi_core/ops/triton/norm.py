"""Root mean square normalisation, one program per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmi_core.ops.quantized_rows import QuantizedRows, RowFormat
from lmi_core.ops.triton.linear_quantized import quantize_rows


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
    y = torch.empty_like(x, dtype=out_dtype)
    if num_rows:
        _rms_norm_kernel[(num_rows,)](
            x,
            x if addend is None else addend,
            weight,
            y,
            num_columns,
            eps,
            HAS_ADDEND=addend is not None,
            BLOCK=triton.next_power_of_2(num_columns),
        )
    return y if codes is None else quantize_rows(y, codes)


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    addend_ptr,
    weight_ptr,
    y_ptr,
    num_columns,
    eps,
    HAS_ADDEND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    is_column = columns < num_columns
    at = tl.program_id(0).to(tl.int64) * num_columns + columns
    x = tl.load(x_ptr + at, mask=is_column, other=0.0)
    if HAS_ADDEND:
        x += tl.load(addend_ptr + at, mask=is_column, other=0.0)
        tl.store(x_ptr + at, x, mask=is_column)
    weight = tl.load(weight_ptr + columns, mask=is_column, other=0.0)
    y = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / num_columns + eps)) * weight
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=is_column)
