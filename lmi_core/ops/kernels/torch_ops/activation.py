"""Gated activations."""

from __future__ import annotations

import torch
from torch import Tensor

from lmi_core.ops.device.quantized_rows import QuantizedRows, RowFormat
from lmi_core.ops.kernels.torch_ops.linear_quantized import quantize_rows


def gated_activation(
    gate_up: Tensor, activation: str, *, out_dtype: torch.dtype, codes: RowFormat | None = None
) -> Tensor | QuantizedRows:
    """act(gate) * up: fp32 [R, 2 n], gate before up -> [R, n]. ``activation``: silu, gelu_tanh.
    ``codes``: the result, rounded to ``out_dtype``, quantised for such weights."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        gate = torch.nn.functional.silu(gate)
    else:
        gate = torch.nn.functional.gelu(gate, approximate="tanh")
    y = (gate * up).to(out_dtype)
    return y if codes is None else quantize_rows(y, codes)
