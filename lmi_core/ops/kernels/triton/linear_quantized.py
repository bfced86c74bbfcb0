"""Products of int8 and fp8 weights and rows that are quantised as the weights are (W8A8).

Sums of int8 are exact, so that no tile shape changes a result, and neither does the order of
outliers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmi_core.ops.device.packed_weight import HEADER_BYTES, PackedWeight
from lmi_core.ops.device.quantized_rows import QuantizedRows
from lmi_core.ops.kernels.triton.codes import has_e4m3, widened
from lmi_core.ops.kernels.triton.expert_tile import own_place, product_rows, store_panels
from lmi_core.ops.kernels.triton.row_codes import quantize_rows

BLOCK_INPUTS = 128


def linear_quantized(
    x: Tensor | QuantizedRows, weight: PackedWeight, bias: Tensor | None, *, block_rows: int = 0
) -> Tensor:
    """As ``torch_ops`` has it. ``block_rows``: that a program takes; 0: by the number of rows."""
    assert weight.row_format is not None
    rows = x if isinstance(x, QuantizedRows) else quantize_rows(x, weight.row_format)
    num_rows = len(rows.scales)
    y = rows.scales.new_empty(num_rows, weight.num_outputs)
    if num_rows == 0:
        return y
    block_rows = block_rows or (16 if num_rows <= 16 else 64)
    num_tiles = triton.cdiv(num_rows, block_rows)
    sizes = {"NUM_EXPERTS": 0, "BLOCK_EXPERTS": 1, "IS_BY_TOKEN": False, "BLOCK_ROWS": block_rows}
    launch_quantized(rows, weight, bias, y, num_tiles, (y, y, y), sizes)
    return y


def launch_quantized(
    x: Tensor | QuantizedRows,
    weight: PackedWeight,
    bias: Tensor | None,
    y: Tensor,
    num_tiles: int,
    lists: tuple[Tensor, Tensor, Tensor],
    sizes: dict[str, int],
) -> None:
    """As ``launch_packed``."""
    assert weight.row_format is not None
    rows = x if isinstance(x, QuantizedRows) else quantize_rows(x, weight.row_format)
    block_panels = 2 if sizes["BLOCK_ROWS"] == 16 else 4
    _linear_quantized_kernel[(triton.cdiv(weight.num_panels, block_panels) * num_tiles,)](
        rows.codes.view(torch.uint8),
        rows.scales,
        rows.scales if rows.outliers is None else rows.outliers,
        weight.panels,
        weight.panels.view(torch.float32),
        y if bias is None else bias,
        y,
        *lists,
        len(y),
        weight.num_inputs,
        rows.codes.shape[1],
        0 if rows.outliers is None else rows.outliers.shape[1],
        weight.num_outputs,
        weight.num_panels,
        weight.num_bytes // weight.num_panels,
        HAS_BIAS=bias is not None,
        HAS_OUTLIERS=rows.outliers is not None,
        IS_INT8=weight.format == "int8",
        IS_GROUPED=weight.group_size > 0,
        IS_GATED=weight.is_gated,
        HEADER=HEADER_BYTES,
        BLOCK_PANELS=block_panels,
        BLOCK_INPUTS=BLOCK_INPUTS,
        IS_DECODED=not has_e4m3(y.device),
        IS_WIDENED=y.device.type != "cuda",
        **sizes,
    )


@triton.jit
def _multiply_fp8(x, codes, IS_DECODED: tl.constexpr, IS_WIDENED: tl.constexpr):
    if IS_WIDENED:  # the interpreter's products of 16 bits don't sum in fp32
        left = widened(x, "e4m3")
        right = widened(codes, "e4m3")
    elif IS_DECODED:  # every number is one of fp16, too
        left = widened(x, "e4m3").to(tl.float16)
        right = widened(codes, "e4m3").to(tl.float16)
    else:
        left = x.to(tl.float8e4nv, bitcast=True)
        right = codes.to(tl.float8e4nv, bitcast=True)
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def _outlier_sums(outliers_at, is_row, codes_at):
    """Of rows' high digits and the weights of their columns, fp32 from exact sums."""
    counts = tl.load(outliers_at, mask=is_row, other=0)
    sums = tl.zeros([outliers_at.shape[0], codes_at.shape[0]], tl.int32)
    for i in range(tl.max(counts, 0)):
        is_there = i < counts
        entry = tl.load(outliers_at + 1 + i, mask=is_there, other=0)
        column = entry >> 8
        high = ((entry & 255) ^ 128) - 128
        at = codes_at[None, :] + (column // 4 * 64 + column % 4)[:, None]
        codes = tl.load(at, mask=is_there[:, None], other=128)
        sums += high[:, None] * (codes.to(tl.int32) - 128)
    return sums.to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def _linear_quantized_kernel(
    row_codes_ptr,
    row_scales_ptr,
    outliers_ptr,
    codes_ptr,
    floats_ptr,
    bias_ptr,
    y_ptr,
    token_rows_ptr,
    first_rows_ptr,
    addresses_ptr,
    num_rows,
    num_inputs,
    stride,
    outlier_stride,
    num_outputs,
    num_panels,
    panel_bytes,
    HAS_BIAS: tl.constexpr,
    HAS_OUTLIERS: tl.constexpr,
    IS_INT8: tl.constexpr,
    IS_GROUPED: tl.constexpr,
    IS_GATED: tl.constexpr,
    HEADER: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    IS_BY_TOKEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_PANELS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    IS_DECODED: tl.constexpr,
    IS_WIDENED: tl.constexpr,
):
    columns = tl.arange(0, BLOCK_PANELS * 16)
    block, tile = own_place(num_panels, BLOCK_PANELS)
    panel = block * BLOCK_PANELS + columns // 16
    lane = columns % 16
    # A panel past the last reads the last one; its outputs are not stored.
    base = tl.minimum(panel, num_panels - 1).to(tl.int64) * panel_bytes
    expert, rows, source, is_there = product_rows(
        token_rows_ptr, first_rows_ptr, num_rows, tile,
        NUM_EXPERTS, BLOCK_EXPERTS, IS_BY_TOKEN, BLOCK_ROWS,
    )  # fmt: skip
    is_row = is_there[:, None]
    num_read = num_inputs
    if NUM_EXPERTS > 0:
        address = tl.load(addresses_ptr + expert)
        codes_ptr = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), 16)
        floats_ptr = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)
        num_read = tl.where(tl.sum(is_there.to(tl.int32), 0) > 0, num_inputs, 0)
    inner = tl.arange(0, BLOCK_INPUTS)
    x_at = row_codes_ptr + source.to(tl.int64)[:, None] * stride + inner[None, :]
    byte = HEADER + inner // 4 * 64 + inner % 4
    codes_at = codes_ptr + byte[:, None] + (base + lane * 4)[None, :]

    sums = tl.zeros([BLOCK_ROWS, BLOCK_PANELS * 16], tl.int32 if IS_INT8 else tl.float32)
    for first in range(0, num_read, BLOCK_INPUTS):
        is_input = first + inner < num_inputs
        x = tl.load(x_at + first, mask=is_row, other=0)
        header_at = first // BLOCK_INPUTS * HEADER if IS_GROUPED else 0
        at = codes_at + first * 16 + header_at
        codes = tl.load(at, mask=is_input[:, None], other=128 if IS_INT8 else 0)
        if IS_INT8:
            weights = (codes ^ 128).to(tl.int8, bitcast=True)
            sums = tl.dot(x.to(tl.int8, bitcast=True), weights, sums, out_dtype=tl.int32)
        else:
            # Tensor cores may keep fewer bits of a sum than fp32 has: it leaves them here.
            product = _multiply_fp8(x, codes, IS_DECODED, IS_WIDENED)
            if IS_GROUPED:
                floats_at = (base + first * 16 + header_at) // 4 + lane
                product *= tl.load(floats_ptr + floats_at)[None, :]
            sums += product
    row_scales = tl.load(row_scales_ptr + source, mask=is_there, other=0.0)
    if IS_GROUPED:
        y = sums * row_scales[:, None]
    else:
        scales = tl.load(floats_ptr + base // 4 + lane)
        total = sums.to(tl.float32)
        if HAS_OUTLIERS:
            total += 256.0 * _outlier_sums(
                outliers_ptr + source.to(tl.int64) * outlier_stride,
                is_there,
                codes_ptr + HEADER + base + lane * 4,
            )
        y = total * (scales[None, :] * row_scales[:, None])

    store_panels(
        y, y_ptr, bias_ptr, expert, rows, is_row, panel, lane, num_panels, num_outputs,
        HAS_BIAS, IS_GATED,
    )  # fmt: skip
