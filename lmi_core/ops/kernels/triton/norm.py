"""Root mean square normalisation and others, one program per row, or per group of its columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmi_core.ops.device.quantized_rows import QuantizedRows, RowFormat, kind_of
from lmi_core.ops.kernels.triton.row_codes import (
    ELEMENTS,
    Places,
    results_like,
    row_block,
    store_row,
)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    out_dtype: torch.dtype,
    addend: Tensor | None = None,
    codes: RowFormat | None = None,
) -> Tensor | QuantizedRows:
    """As ``torch_ops`` has it."""
    return norm(x, weight, None, eps, kind="rms", out_dtype=out_dtype, addend=addend, codes=codes)


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    kind: str,
    out_dtype: torch.dtype,
    addend: Tensor | None = None,
    codes: RowFormat | None = None,
) -> Tensor | QuantizedRows:
    """As ``torch_ops`` has it."""
    y, places = results_like(x, x.shape[1], out_dtype, codes)
    _launch(x, addend, weight, bias, places, eps, kind, (0, 1, x.shape[1]), out_dtype, codes)
    return y


def norm_heads(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    kind: str,
    first_column: int,
    num_groups: int,
) -> Tensor:
    """As ``torch_ops`` has it."""
    groups = (first_column, num_groups, weight.numel() // num_groups)
    _launch(x, None, weight, bias, (x, x, x, x, 0, 0, 0.0), eps, kind, groups, x.dtype, None)
    return x


def _launch(
    x: Tensor,
    addend: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    places: Places,
    eps: float,
    kind: str,
    groups: tuple[int, int, int],
    out_dtype: torch.dtype,
    codes: RowFormat | None,
) -> None:
    """``groups``: their first column, their number and their columns."""
    first_column, num_groups, num_columns = groups
    if len(x):
        _norm_kernel[(len(x), num_groups)](
            x,
            x if addend is None else addend,
            x if weight is None else weight,
            x if bias is None else bias,
            *places,
            num_columns,
            x.shape[1],
            first_column,
            eps,
            KIND=kind,
            HAS_ADDEND=addend is not None,
            HAS_WEIGHT=weight is not None,
            HAS_BIAS=bias is not None,
            ELEMENT=ELEMENTS[out_dtype],
            CODES="" if codes is None else kind_of(codes),
            BLOCK=row_block(num_columns),
        )


@triton.jit
def _norm_kernel(
    x_ptr,
    addend_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    row_codes_ptr,
    row_scales_ptr,
    outliers_ptr,
    stride,
    most_outliers,
    fixed_scale,
    num_columns,
    x_stride,
    first_column,
    eps,
    KIND: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ELEMENT: tl.constexpr,
    CODES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    is_column = columns < num_columns
    row = tl.program_id(0).to(tl.int64)
    in_groups = tl.program_id(1) * num_columns + columns
    start = row * x_stride + first_column + tl.program_id(1) * num_columns
    x = tl.load(x_ptr + start + columns, mask=is_column, other=0.0)
    if HAS_ADDEND:
        x += tl.load(addend_ptr + start + columns, mask=is_column, other=0.0)
        tl.store(x_ptr + start + columns, x, mask=is_column)
    if KIND == "layer":
        x = tl.where(is_column, x - tl.sum(x, 0) / num_columns, 0.0)
    if KIND != "none":
        x *= 1.0 / tl.sqrt(tl.sum(x * x, 0) / num_columns + eps)
    if HAS_WEIGHT:
        x *= tl.load(weight_ptr + in_groups, mask=is_column, other=0.0)
    if HAS_BIAS:
        x += tl.load(bias_ptr + in_groups, mask=is_column, other=0.0)
    if CODES == "":
        tl.store(y_ptr + start + columns, x.to(ELEMENT), mask=is_column)
    else:
        store_row(
            x,
            row,
            columns,
            num_columns,
            y_ptr,
            row_codes_ptr,
            row_scales_ptr,
            outliers_ptr,
            stride,
            most_outliers,
            fixed_scale,
            ELEMENT,
            CODES,
        )
