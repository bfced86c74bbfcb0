"""Matrix products with few rows, or with int4 weights; dense ones of more rows are torch's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lmi_core.ops.cuda import library
from lmi_core.ops.torch_ops.linear import linear as torch_linear

MAX_FEW_ROWS = 8
"""LMI_MAX_FEW_ROWS."""
DTYPES = (torch.bfloat16, torch.float16)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight^T + bias: [R, k], [n, k] of one dtype -> fp32 [R, n]; bias is fp32."""
    num_rows, num_inputs = x.shape
    if num_rows > MAX_FEW_ROWS or x.dtype not in DTYPES or num_inputs % 8 != 0:
        return torch_linear(x, weight, bias)
    y = torch.empty(num_rows, len(weight), dtype=torch.float32, device=x.device)
    library.call(
        "linear_few_rows",
        x,
        x=x,
        weight=weight,
        bias=bias,
        y=y,
        num_rows=num_rows,
        num_outputs=len(weight),
        num_inputs=num_inputs,
        dtype=x.dtype,
    )
    return y


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Weight:
    """A weight [num_outputs, num_inputs] in the bytes of ``_native.LinearWeight`` on a device."""

    panels: Tensor
    num_outputs: int
    num_inputs: int
    group_size: int
    is_gated: bool


def linear_int4(x: Tensor, weight: Int4Weight, bias: Tensor | None) -> Tensor:
    """x @ weight^T + bias: bf16 or fp16 [R, k] -> fp32 [R, n]; a gated weight's gate before up."""
    y = torch.empty(len(x), weight.num_outputs, dtype=torch.float32, device=x.device)
    library.call(
        "linear_int4",
        x,
        x=x,
        panels=weight.panels,
        bias=bias,
        y=y,
        num_rows=len(x),
        num_outputs=weight.num_outputs,
        num_inputs=weight.num_inputs,
        group_size=weight.group_size,
        is_gated=weight.is_gated,
        dtype=x.dtype,
    )
    return y
