"""Gated activations, one program per row and block of columns, or per row that is quantised."""

from __future__ import annotations

from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmi_core.ops.device.quantized_rows import QuantizedRows, RowFormat
from lmi_core.ops.kernels.triton.row_codes import (
    ELEMENTS,
    quantize_rows,
    results_like,
    row_block,
    row_warps,
    store_row,
)

_BLOCK = 1024
_MAX_CODED_BLOCK = 32768


def gated_activation(
    gate_up: Tensor, activation: str, *, out_dtype: torch.dtype, codes: RowFormat | None = None
) -> Tensor | QuantizedRows:
    """act(gate) * up: fp32 [R, 2 n], gate before up -> [R, n]. ``activation``: silu, gelu_tanh,
    gelu, relu, relu2.
    ``codes``: the result, rounded to ``out_dtype``, quantised for such weights."""
    num_rows, num_columns = gate_up.shape[0], gate_up.shape[1] // 2
    block = row_block(num_columns)
    if codes is not None and block > _MAX_CODED_BLOCK:
        return quantize_rows(
            cast(Tensor, gated_activation(gate_up, activation, out_dtype=out_dtype)), codes
        )
    if codes is None:
        block = min(_BLOCK, block)
    y, places = results_like(gate_up, num_columns, out_dtype, codes)
    if num_rows:
        _gated_activation_kernel[(num_rows, triton.cdiv(num_columns, block))](
            gate_up,
            *places,
            num_columns,
            ACTIVATION=activation,
            ELEMENT=ELEMENTS[out_dtype],
            CODES=codes or "",
            BLOCK=block,
            num_warps=row_warps(block),
        )
    return y


@triton.jit
def _gated_activation_kernel(
    gate_up_ptr,
    y_ptr,
    row_codes_ptr,
    row_scales_ptr,
    outliers_ptr,
    stride,
    most_outliers,
    num_columns,
    ACTIVATION: tl.constexpr,
    ELEMENT: tl.constexpr,
    CODES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < num_columns
    source = gate_up_ptr + row * 2 * num_columns + columns
    gate = tl.load(source, mask=is_column, other=0.0)
    up = tl.load(source + num_columns, mask=is_column, other=0.0)
    if ACTIVATION == "gelu":
        activated = gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == "relu":
        activated = tl.maximum(gate, 0.0)
    elif ACTIVATION == "relu2":
        activated = tl.maximum(gate, 0.0) * tl.maximum(gate, 0.0)
    else:
        # gelu_tanh: (1 + tanh(z)) / 2 is sigmoid(2 z); 1.5957... is 2 sqrt(2 / pi).
        slope = 1.0
        if ACTIVATION == "gelu_tanh":
            slope = 1.5957691216057308 * (1.0 + 0.044715 * gate * gate)
        z = gate * slope
        decay = tl.exp(-tl.abs(z))
        activated = gate * (tl.where(z >= 0.0, 1.0, decay) / (1.0 + decay))
    y = activated * up
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
