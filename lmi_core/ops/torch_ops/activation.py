"""Gated activations."""

from __future__ import annotations

import torch
from torch import Tensor


def gated_activation(gate_up: Tensor, activation: str, *, out_dtype: torch.dtype) -> Tensor:
    """act(gate) * up: fp32 [R, 2 n], gate before up -> [R, n]. ``activation``: silu, gelu_tanh."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        gate = torch.nn.functional.silu(gate)
    else:
        gate = torch.nn.functional.gelu(gate, approximate="tanh")
    return (gate * up).to(out_dtype)
