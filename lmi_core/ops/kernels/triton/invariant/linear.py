"""Matrix products with one tile shape for all row counts: a chain of sums over the inputs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmi_core.ops.device.expert_rows import ExpertRows, ExpertTable
from lmi_core.ops.device.packed_weight import PackedWeight
from lmi_core.ops.device.quantized_rows import QuantizedRows
from lmi_core.ops.kernels.triton.experts import grouped_linear as grouped_linear_in_tiles
from lmi_core.ops.kernels.triton.experts import head_linear as head_linear_in_tiles
from lmi_core.ops.kernels.triton.linear import linear_packed as linear_packed_in_tiles
from lmi_core.ops.kernels.triton.linear_quantized import (
    linear_quantized as linear_quantized_in_tiles,
)

BLOCK_ROWS = 64
BLOCK_OUTPUTS = 32
BLOCK_INPUTS = 64
PACKED_BLOCK_ROWS = 16


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, out_dtype: torch.dtype = torch.float32
) -> Tensor:
    """As ``torch_ops`` has it."""
    num_rows, num_inputs = x.shape
    num_outputs = len(weight)
    y = torch.empty(num_rows, num_outputs, dtype=out_dtype, device=x.device)
    if num_rows:
        grid = (triton.cdiv(num_outputs, BLOCK_OUTPUTS), triton.cdiv(num_rows, BLOCK_ROWS))
        _linear_kernel[grid](
            x,
            weight,
            y if bias is None else bias,
            y,
            num_rows,
            num_outputs,
            num_inputs,
            HAS_BIAS=bias is not None,
            BLOCK_ROWS=BLOCK_ROWS,
            BLOCK_OUTPUTS=BLOCK_OUTPUTS,
            BLOCK_INPUTS=BLOCK_INPUTS,
            IS_WIDENED=x.device.type != "cuda",
        )
    return y


def linear_packed(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, *, unpacked: Tensor | None = None
) -> Tensor:
    """As ``torch_ops`` has it, never by way of ``unpacked``, whatever the number of rows."""
    return linear_packed_in_tiles(x, weight, bias, block_rows=PACKED_BLOCK_ROWS)


def linear_quantized(
    x: Tensor | QuantizedRows, weight: PackedWeight, bias: Tensor | None
) -> Tensor:
    """As ``torch_ops`` has it. Sums of int8 are exact in any tile."""
    block_rows = 0 if weight.format == "int8" else PACKED_BLOCK_ROWS
    return linear_quantized_in_tiles(x, weight, bias, block_rows=block_rows)


def grouped_linear(
    x: Tensor,
    routes: Tensor | None,
    rows: ExpertRows,
    table: ExpertTable,
    bias: Tensor | None,
    *,
    is_by_token: bool,
    sums: Tensor | None = None,
) -> Tensor | None:
    """As ``torch_ops`` has it."""
    return grouped_linear_in_tiles(
        *(x, routes, rows, table, bias),
        is_by_token=is_by_token,
        sums=sums,
        block_rows=PACKED_BLOCK_ROWS,
    )


def head_linear(x: Tensor, table: ExpertTable, *, out_dtype: torch.dtype) -> Tensor:
    """As ``torch_ops`` has it."""
    return head_linear_in_tiles(x, table, out_dtype=out_dtype, block_rows=PACKED_BLOCK_ROWS)


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    num_rows,
    num_outputs,
    num_inputs,
    HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    IS_WIDENED: tl.constexpr,
):
    outputs = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inner = tl.arange(0, BLOCK_INPUTS)
    is_row = rows[:, None] < num_rows
    is_output = outputs[None, :] < num_outputs
    x_at = x_ptr + rows.to(tl.int64)[:, None] * num_inputs + inner[None, :]
    weight_at = weight_ptr + outputs.to(tl.int64)[None, :] * num_inputs + inner[:, None]
    sums = tl.zeros([BLOCK_ROWS, BLOCK_OUTPUTS], tl.float32)
    for first in range(0, num_inputs, BLOCK_INPUTS):
        is_input = first + inner < num_inputs
        x = tl.load(x_at + first, mask=is_row & is_input[None, :], other=0.0)
        weight = tl.load(weight_at + first, mask=is_output & is_input[:, None], other=0.0)
        if IS_WIDENED:  # the interpreter's products of 16 bits don't sum in fp32
            x = x.to(tl.float32)
            weight = weight.to(tl.float32)
        sums = tl.dot(x, weight, sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias_ptr + outputs, mask=outputs < num_outputs, other=0.0)[None, :]
    y_at = y_ptr + rows.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    tl.store(y_at, sums, mask=is_row & is_output)
