"""Products of int8 weights and rows that are quantised on the way (W8A8)."""

from __future__ import annotations

import torch
from torch import Tensor

from lmi_core.ops.cuda import library
from lmi_core.ops.packed_weight import PackedWeight
from lmi_core.ops.quantized_rows import QuantizedRows


def linear_quantized(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """x @ weight^T + bias, x rounded to int8 row by row: [R, k] -> fp32 [R, n]; bias is fp32."""
    rows = quantize_rows(x)
    y = torch.empty(len(x), weight.num_outputs, dtype=torch.float32, device=x.device)
    library.call(
        "linear_quantized",
        x,
        codes=rows.codes,
        row_scales=rows.scales,
        panels=weight.panels,
        bias=bias,
        y=y,
        num_rows=len(x),
        num_outputs=weight.num_outputs,
        num_inputs=weight.num_inputs,
        stride=rows.codes.shape[1],
        is_gated=weight.is_gated,
    )
    return y


def quantize_rows(x: Tensor) -> QuantizedRows:
    """x [R, n] in fp32, bf16 or fp16."""
    rows = QuantizedRows.empty_for(x)
    library.call(
        "quantize_rows",
        x,
        x=x,
        codes=rows.codes,
        scales=rows.scales,
        num_rows=len(x),
        num_columns=x.shape[1],
        stride=rows.codes.shape[1],
        dtype=x.dtype,
    )
    return rows
