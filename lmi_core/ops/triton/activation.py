"""Gated activations, one program per row and block of columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmi_core.ops.quantized_rows import QuantizedRows, RowFormat
from lmi_core.ops.triton.linear_quantized import quantize_rows

_BLOCK = 1024


def gated_activation(
    gate_up: Tensor, activation: str, *, out_dtype: torch.dtype, codes: RowFormat | None = None
) -> Tensor | QuantizedRows:
    """act(gate) * up: fp32 [R, 2 n], gate before up -> [R, n]. ``activation``: silu, gelu_tanh.
    ``codes``: the result, rounded to ``out_dtype``, quantised for such weights."""
    num_rows, num_columns = gate_up.shape[0], gate_up.shape[1] // 2
    y = gate_up.new_empty(num_rows, num_columns, dtype=out_dtype)
    if num_rows:
        block = min(_BLOCK, triton.next_power_of_2(num_columns))
        _gated_activation_kernel[(num_rows, triton.cdiv(num_columns, block))](
            gate_up, y, num_columns, IS_SILU=activation == "silu", BLOCK=block
        )
    return y if codes is None else quantize_rows(y, codes)


@triton.jit
def _gated_activation_kernel(
    gate_up_ptr, y_ptr, num_columns, IS_SILU: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < num_columns
    source = gate_up_ptr + row * 2 * num_columns + columns
    gate = tl.load(source, mask=is_column, other=0.0)
    up = tl.load(source + num_columns, mask=is_column, other=0.0)
    # gelu_tanh: (1 + tanh(z)) / 2 is sigmoid(2 z); 1.5957... is 2 sqrt(2 / pi).
    slope = 1.0 if IS_SILU else 1.5957691216057308 * (1.0 + 0.044715 * gate * gate)
    z = gate * slope
    decay = tl.exp(-tl.abs(z))
    sigmoid = tl.where(z >= 0.0, 1.0, decay) / (1.0 + decay)
    y = gate * sigmoid * up
    tl.store(y_ptr + row * num_columns + columns, y.to(y_ptr.dtype.element_ty), mask=is_column)
