"""Gated activations."""

from __future__ import annotations

import torch
from torch import Tensor

from lmi_core.ops.device.quantized_rows import QuantizedRows, RowFormat
from lmi_core.ops.kernels.cuda import library
from lmi_core.ops.kernels.cuda.linear_quantized import quantize_rows
from lmi_core.ops.kernels.cuda.results import results_like
from lmi_core.ops.kernels.fallback import fallback

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
MAX_CODED_COLUMNS = 32768
"""LMI_MAX_CODED_COLUMNS; a quarter of it for rows that are no multiple of 4."""


def can_quantize(num_columns: int) -> bool:
    """Whether the kernel gives codes of rows of so many columns."""
    most = MAX_CODED_COLUMNS if num_columns % 4 == 0 else MAX_CODED_COLUMNS // 4
    return num_columns <= most


def gated_activation(
    gate_up: Tensor, activation: str, *, out_dtype: torch.dtype, codes: RowFormat | None = None
) -> Tensor | QuantizedRows:
    """act(gate) * up: fp32 [R, 2 n], gate before up -> [R, n]. ``activation``: silu, gelu_tanh.
    ``codes``: the result, rounded to ``out_dtype``, quantised for such weights."""
    if activation not in ACTIVATIONS:
        other = fallback("gated_activation", gate_up.device, activation)
        plain: Tensor | QuantizedRows = other(gate_up, activation, out_dtype=out_dtype, codes=codes)
        return plain
    num_rows, num_columns = gate_up.shape[0], gate_up.shape[1] // 2
    in_kernel = codes if can_quantize(num_columns) else None
    y, named = results_like(gate_up, num_columns, out_dtype, in_kernel)
    library.call(
        "gated_activation",
        gate_up,
        gate_up=gate_up,
        num_rows=num_rows,
        num_columns=num_columns,
        activation=ACTIVATIONS[activation],
        y_dtype=out_dtype,
        **named,
    )
    if codes is None or isinstance(y, QuantizedRows):
        return y
    return quantize_rows(y, codes)
