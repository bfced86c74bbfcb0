"""Rows quantised each on its own, by a kernel of its own or by those that make them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmi_core.ops.device.quantized_rows import LEAST_MAGNITUDE, QuantizedRows, RowFormat, stride_of
from lmi_core.ops.kernels.triton.codes import float8_codes

ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_THREAD_COLUMNS = 32
_LEAST = tl.constexpr(LEAST_MAGNITUDE)


def row_block(num_columns: int) -> int:
    """Columns of a program that has a row, with the padding of its codes."""
    block: int = triton.next_power_of_2(stride_of(num_columns))
    return block


def row_warps(block: int) -> int:
    """Of a program with a row of so many columns, so that they fit into its registers."""
    return min(max(block // (32 * _THREAD_COLUMNS), 4), 32)


def results_like(
    x: Tensor, num_columns: int, dtype: torch.dtype, codes: RowFormat | None
) -> tuple[Tensor | QuantizedRows, tuple[Tensor, Tensor, Tensor, int]]:
    """Room for as many rows as x has, of numbers or of codes; and, as kernels take them, a tensor
    for numbers, one for codes, one for scales (nobody follows those that aren't wanted), and the
    codes' stride."""
    if codes is None:
        y = x.new_empty(len(x), num_columns, dtype=dtype)
        return y, (y, y, y, 0)
    rows = QuantizedRows.empty(len(x), num_columns, codes, x.device)
    as_bytes = rows.codes.view(torch.uint8)
    return rows, (as_bytes, as_bytes, rows.scales, rows.codes.shape[1])


def quantize_rows(x: Tensor, format: RowFormat) -> QuantizedRows:
    """x [R, n] in fp32, bf16 or fp16."""
    rows, (_, codes, scales, stride) = results_like(x, x.shape[1], x.dtype, format)
    assert isinstance(rows, QuantizedRows)
    if len(x):
        block = row_block(x.shape[1])
        _quantize_rows_kernel[(len(x),)](
            x,
            codes,
            scales,
            x.shape[1],
            stride,
            CODES=format,
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
    stride,
    ELEMENT: tl.constexpr,
    CODES: tl.constexpr,
):
    """Numbers of a row, rounded to ELEMENT, or if they are all of it the codes of those. CODES:
    int8, fp8, or none."""
    rounded = y.to(ELEMENT)
    if CODES == "":
        tl.store(y_ptr + row * num_columns + columns, rounded, mask=columns < num_columns)
    else:
        x = tl.where(columns < num_columns, rounded.to(tl.float32), 0.0)
        store_codes(x, row, columns, row_codes_ptr, row_scales_ptr, stride, CODES)


@triton.jit
def store_codes(x, row, columns, row_codes_ptr, row_scales_ptr, stride, CODES: tl.constexpr):
    """Of all numbers of a row, zeros where it is padded."""
    codes, scale = row_codes(x, CODES)
    tl.store(row_codes_ptr + row * stride + columns, codes, mask=columns < stride)
    tl.store(row_scales_ptr + row, scale)


@triton.jit
def row_codes(x, CODES: tl.constexpr):
    """Codes of a row, as bytes, and their scale."""
    MOST: tl.constexpr = 127.0 if CODES == "int8" else 448.0
    is_finite = tl.abs(x) <= 3.4028234663852886e38
    x = tl.where(is_finite, x, 0.0)
    most = tl.max(tl.abs(x), 0)
    is_row_finite = tl.min(is_finite.to(tl.int32), 0) == 1
    is_usable = is_row_finite & (most >= _LEAST)
    scale = tl.where(is_usable, tl.div_rn(most, MOST), 1.0)
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
    num_columns,
    stride,
    CODES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * num_columns + columns, mask=columns < num_columns, other=0.0)
    store_codes(x.to(tl.float32), row, columns, row_codes_ptr, row_scales_ptr, stride, CODES)
