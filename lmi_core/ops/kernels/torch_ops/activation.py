"""Activations, gated and not."""

from __future__ import annotations

import torch
from torch import Tensor

from lmi_core.ops.device.quantized_rows import QuantizedRows, RowFormat
from lmi_core.ops.kernels.torch_ops.linear_quantized import quantize_rows


def gated_activation(
    gate_up: Tensor, activation: str, *, out_dtype: torch.dtype, codes: RowFormat | None = None
) -> Tensor | QuantizedRows:
    """act(gate) * up: [R, 2 n], gate before up -> [R, n]. ``gate_up``: fp32, or bf16 as
    ``out_dtype``. ``activation``: silu, gelu_tanh, gelu, relu, relu2, clamped_swiglu. ``codes``:
    the result, rounded to ``out_dtype``, quantised for such weights."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0) + 1.0
        y = (gate * torch.sigmoid(1.702 * gate) * up).to(out_dtype)
    else:
        y = (_activated(gate, activation) * up).to(out_dtype)
    return y if codes is None else quantize_rows(y, codes)


def activation(
    x: Tensor, activation: str, *, out_dtype: torch.dtype, codes: RowFormat | None = None
) -> Tensor | QuantizedRows:
    """act(x): [R, n] -> [R, n], otherwise as ``gated_activation``."""
    y = _activated(x.float(), activation).to(out_dtype)
    return y if codes is None else quantize_rows(y, codes)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap tanh(x / cap): fp32 [R, n], in place."""
    return x.div_(cap).tanh_().mul_(cap)


def clip(x: Tensor, cap: float) -> Tensor:
    """x between -cap and cap: fp32 [R, n], in place."""
    return x.clamp_(-cap, cap)


def _activated(x: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return torch.nn.functional.silu(x)
    if activation == "gelu_tanh":
        return torch.nn.functional.gelu(x, approximate="tanh")
    if activation == "gelu":
        return torch.nn.functional.gelu(x)
    y = x.relu()
    return y.square() if activation == "relu2" else y
