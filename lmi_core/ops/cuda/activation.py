"""Gated activations."""

from __future__ import annotations

import torch
from torch import Tensor

from lmi_core.ops.cuda import library

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


def gated_activation(gate_up: Tensor, activation: str, *, out_dtype: torch.dtype) -> Tensor:
    """act(gate) * up: fp32 [R, 2 n], gate before up -> [R, n]. ``activation``: silu, gelu_tanh."""
    num_rows, num_columns = gate_up.shape[0], gate_up.shape[1] // 2
    y = gate_up.new_empty(num_rows, num_columns, dtype=out_dtype)
    library.call(
        "gated_activation",
        gate_up,
        gate_up=gate_up,
        y=y,
        num_rows=num_rows,
        num_columns=num_columns,
        activation=ACTIVATIONS[activation],
        y_dtype=out_dtype,
    )
    return y
