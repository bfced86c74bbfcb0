"""Activations, gated and not."""

from __future__ import annotations

import torch
from torch import Tensor

from lmi_core.ops.device.quantized_rows import QuantizedRows, RowFormat
from lmi_core.ops.kernels.cuda import library
from lmi_core.ops.kernels.cuda.linear_quantized import quantize_rows
from lmi_core.ops.kernels.cuda.results import results_like

ACTIVATIONS = {
    "silu": 0,
    "gelu_tanh": 1,
    "gelu": 2,
    "relu": 3,
    "relu2": 4,
    "clamped_swiglu": 5,
    "soft_cap": 6,
    "clip": 7,
}
CODED_ACTIVATIONS = ("silu", "gelu_tanh")
"""Those that ``gated_activation`` has, and may quantise the results of."""
MAX_CODED_COLUMNS = 32768
"""LMI_MAX_CODED_COLUMNS; a quarter of it for rows that are no multiple of 4."""


def can_quantize(num_columns: int) -> bool:
    """Whether the kernel gives codes of rows of so many columns."""
    most = MAX_CODED_COLUMNS if num_columns % 4 == 0 else MAX_CODED_COLUMNS // 4
    return num_columns <= most


def gated_activation(
    gate_up: Tensor, activation: str, *, out_dtype: torch.dtype, codes: RowFormat | None = None
) -> Tensor | QuantizedRows:
    """As ``torch_ops`` has it; with ``codes``, ``gate_up`` is fp32."""
    if activation not in CODED_ACTIVATIONS:
        plain = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2, dtype=out_dtype)
        _activate(gate_up, plain, activation, is_gated=True)
        return plain if codes is None else quantize_rows(plain, codes)
    num_rows, num_columns = gate_up.shape[0], gate_up.shape[1] // 2
    in_kernel = codes if can_quantize(num_columns) else None
    y, named = results_like(gate_up, num_columns, out_dtype, in_kernel)
    library.call(
        "gated_activation",
        gate_up,
        gate_up=gate_up,
        x_dtype=gate_up.dtype,
        num_rows=num_rows,
        num_columns=num_columns,
        activation=ACTIVATIONS[activation],
        y_dtype=out_dtype,
        **named,
    )
    if codes is None or isinstance(y, QuantizedRows):
        return y
    return quantize_rows(y, codes)


def activation(
    x: Tensor, activation: str, *, out_dtype: torch.dtype, codes: RowFormat | None = None
) -> Tensor | QuantizedRows:
    """As ``torch_ops`` has it."""
    y = torch.empty_like(x, dtype=out_dtype)
    _activate(x, y, activation)
    return y if codes is None else quantize_rows(y, codes)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """As ``torch_ops`` has it."""
    return _activate(x, x, "soft_cap", cap=cap)


def clip(x: Tensor, cap: float) -> Tensor:
    """As ``torch_ops`` has it."""
    return _activate(x, x, "clip", cap=cap)


def _activate(
    x: Tensor, y: Tensor, activation: str, *, is_gated: bool = False, cap: float = 0.0
) -> Tensor:
    library.call(
        "activation",
        x,
        x=x,
        x_dtype=x.dtype,
        y=y,
        num_rows=len(y),
        num_columns=y.shape[1],
        activation=ACTIVATIONS[activation],
        is_gated=is_gated,
        cap=cap,
        y_dtype=y.dtype,
    )
    return y
