"""Rows quantised each on its own, by a kernel of its own or by those that make them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmi_core.ops.device.quantized_rows import (
    LEAST_MAGNITUDE,
    OCTAVES,
    QuantizedRows,
    RowFormat,
    fixed_scale,
    kind_of,
    max_outliers,
    stride_of,
)
from lmi_core.ops.kernels.triton.codes import float8_codes

ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
Places = tuple[Tensor, Tensor, Tensor, Tensor, int, int, float]
"""A tensor for numbers, one for codes, one for scales, one for outliers (nobody follows those that
aren't wanted), the codes' stride, the most outliers of a row, and the scale of all rows, 0: each
has its own."""
_THREAD_COLUMNS = 32
_LEAST = tl.constexpr(LEAST_MAGNITUDE)
_FIRST_PART = tl.constexpr(2.0 ** -OCTAVES[0])
_FINEST_PART = tl.constexpr(2.0 ** (1 - OCTAVES[-1]))
_NUM_PARTS = tl.constexpr(len(OCTAVES))


def row_block(num_columns: int) -> int:
    """Columns of a program that has a row, with the padding of its codes."""
    block: int = triton.next_power_of_2(stride_of(num_columns))
    return block


def row_warps(block: int) -> int:
    """Of a program with a row of so many columns, so that they fit into its registers."""
    return min(max(block // (32 * _THREAD_COLUMNS), 4), 32)


def results_like(
    x: Tensor, num_columns: int, dtype: torch.dtype, codes: RowFormat | None
) -> tuple[Tensor | QuantizedRows, Places]:
    """Room for as many rows as x has, of numbers or of codes; and what kernels take of it."""
    if codes is None:
        y = x.new_empty(len(x), num_columns, dtype=dtype)
        return y, (y, y, y, y, 0, 0, 0.0)
    rows = QuantizedRows.empty(len(x), num_columns, codes, x.device)
    as_bytes = rows.codes.view(torch.uint8)
    outliers = as_bytes if rows.outliers is None else rows.outliers
    return rows, (
        as_bytes,
        as_bytes,
        rows.scales,
        outliers,
        rows.codes.shape[1],
        max_outliers(num_columns),
        fixed_scale(codes),
    )


def quantize_rows(x: Tensor, format: RowFormat) -> QuantizedRows:
    """As ``torch_ops`` has it, of fp32, bf16 or fp16."""
    rows, (_, *places) = results_like(x, x.shape[1], x.dtype, format)
    assert isinstance(rows, QuantizedRows)
    if len(x):
        block = row_block(x.shape[1])
        _quantize_rows_kernel[(len(x),)](
            x,
            *places,
            x.shape[1],
            CODES=kind_of(format),
            BLOCK=block,
            num_warps=row_warps(block),
        )
    return rows


@triton.jit
def store_row(
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
    fixed_scale,
    ELEMENT: tl.constexpr,
    CODES: tl.constexpr,
):
    """Numbers of a row, rounded to ELEMENT, or if they are all of it the codes of those. CODES:
    int8, outliers, fp8, or none."""
    rounded = y.to(ELEMENT)
    if CODES == "":
        tl.store(y_ptr + row * num_columns + columns, rounded, mask=columns < num_columns)
    else:
        x = tl.where(columns < num_columns, rounded.to(tl.float32), 0.0)
        store_codes(
            x,
            row,
            columns,
            row_codes_ptr,
            row_scales_ptr,
            outliers_ptr,
            stride,
            most_outliers,
            fixed_scale,
            CODES,
        )


@triton.jit
def store_codes(
    x,
    row,
    columns,
    row_codes_ptr,
    row_scales_ptr,
    outliers_ptr,
    stride,
    most_outliers,
    fixed_scale,
    CODES: tl.constexpr,
):
    """Of all numbers of a row, zeros where it is padded."""
    if CODES == "outliers":
        codes, high, scale = row_digits(x, most_outliers)
        is_outlier = high != 0
        place = row * (1 + most_outliers)
        nth = tl.cumsum(is_outlier.to(tl.int32), 0)
        tl.store(outliers_ptr + place + nth, (columns << 8) | (high & 255), mask=is_outlier)
        tl.store(outliers_ptr + place, tl.sum(is_outlier.to(tl.int32), 0))
    else:
        codes, scale = row_codes(x, fixed_scale, CODES)
    tl.store(row_codes_ptr + row * stride + columns, codes, mask=columns < stride)
    tl.store(row_scales_ptr + row, scale)


@triton.jit
def row_digits(x, most_outliers):
    """Low digits of a row, as bytes, high ones, and their scale."""
    is_finite = tl.abs(x) <= 3.4028234663852886e38
    x = tl.where(is_finite, x, 0.0)
    size = tl.abs(x)
    largest = tl.max(size, 0)
    is_row_finite = tl.min(is_finite.to(tl.int32), 0) == 1
    is_usable = is_row_finite & (largest >= _LEAST)
    threshold = largest * 2.0
    reached = largest * _FIRST_PART
    for _ in tl.static_range(_NUM_PARTS):
        num_reaching = tl.sum((size >= reached).to(tl.int32), 0)
        threshold = tl.where(num_reaching <= most_outliers, 2.0 * reached, threshold)
        reached = reached * 0.5
    below = tl.max(tl.where(size < threshold, size, 0.0), 0)
    most = tl.maximum(below, largest * _FINEST_PART)
    scale = tl.where(is_usable, tl.div_rn(most, 127.0), 1.0)
    scaled = x * tl.div_rn(1.0, scale)
    scaled = tl.where(is_usable, tl.minimum(tl.maximum(scaled, -32512.0), 32512.0), 0.0)
    whole = ((scaled + 12582912.0) - 12582912.0).to(tl.int32)
    high = (whole + 128) >> 8
    codes = (whole & 255).to(tl.uint8)
    return codes, high, tl.where(is_usable, scale, tl.where(is_row_finite, 0.0, float("nan")))


@triton.jit
def row_codes(x, fixed_scale, CODES: tl.constexpr):
    """Codes of a row, as bytes, and their scale, which may be fixed for fp8."""
    MOST: tl.constexpr = 127.0 if CODES == "int8" else 448.0
    is_finite = tl.abs(x) <= 3.4028234663852886e38
    x = tl.where(is_finite, x, 0.0)
    most = tl.max(tl.abs(x), 0)
    is_row_finite = tl.min(is_finite.to(tl.int32), 0) == 1
    is_usable = is_row_finite & (most >= _LEAST)
    scale = tl.where(is_usable, tl.div_rn(most, MOST), 1.0)
    if CODES == "fp8":
        scale = tl.where(is_usable & (fixed_scale > 0.0), fixed_scale, scale)
    inverse = tl.div_rn(1.0, scale)
    scaled = tl.where(is_usable, tl.minimum(tl.maximum(x * inverse, -MOST), MOST), 0.0)
    if CODES == "int8":
        whole = (scaled + 12582912.0) - 12582912.0  # 1.5 * 2^23: to the nearest, ties to even
        codes = whole.to(tl.int8).to(tl.uint8, bitcast=True)
    else:
        codes = float8_codes(scaled, tl.full([1], 1.0, tl.float32), "e4m3")
    return codes, tl.where(is_usable, scale, tl.where(is_row_finite, 0.0, float("nan")))


@triton.jit
def _quantize_rows_kernel(
    x_ptr,
    row_codes_ptr,
    row_scales_ptr,
    outliers_ptr,
    stride,
    most_outliers,
    fixed_scale,
    num_columns,
    CODES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * num_columns + columns, mask=columns < num_columns, other=0.0)
    store_codes(
        x.to(tl.float32),
        row,
        columns,
        row_codes_ptr,
        row_scales_ptr,
        outliers_ptr,
        stride,
        most_outliers,
        fixed_scale,
        CODES,
    )
