"""Activations, one program per row and block of columns, or per row that is quantised."""

from __future__ import annotations

from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmi_core.ops.device.quantized_rows import QuantizedRows, RowFormat, kind_of
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
    """As ``torch_ops`` has it."""
    return _activated(gate_up, gate_up.shape[1] // 2, activation, out_dtype, codes)


def activation(
    x: Tensor, activation: str, *, out_dtype: torch.dtype, codes: RowFormat | None = None
) -> Tensor | QuantizedRows:
    """As ``torch_ops`` has it."""
    return _activated(x, x.shape[1], activation, out_dtype, codes)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """As ``torch_ops`` has it."""
    return _bounded(x, cap, is_soft=True)


def clip(x: Tensor, cap: float) -> Tensor:
    """As ``torch_ops`` has it."""
    return _bounded(x, cap, is_soft=False)


def _activated(
    x: Tensor, num_columns: int, activation: str, out_dtype: torch.dtype, codes: RowFormat | None
) -> Tensor | QuantizedRows:
    block = row_block(num_columns)
    if codes is not None and block > _MAX_CODED_BLOCK:
        y = cast(Tensor, _activated(x, num_columns, activation, out_dtype, None))
        return quantize_rows(y, codes)
    if codes is None:
        block = min(_BLOCK, block)
    result, places = results_like(x, num_columns, out_dtype, codes)
    if len(x):
        _activation_kernel[(len(x), triton.cdiv(num_columns, block))](
            x,
            *places,
            num_columns,
            ACTIVATION=activation,
            IS_GATED=x.shape[1] != num_columns,
            ELEMENT=ELEMENTS[out_dtype],
            CODES="" if codes is None else kind_of(codes),
            BLOCK=block,
            num_warps=row_warps(block),
        )
    return result


def _bounded(x: Tensor, cap: float, *, is_soft: bool) -> Tensor:
    num_rows, num_columns = x.shape
    if num_rows:
        grid = (num_rows, triton.cdiv(num_columns, _BLOCK))
        _bounding_kernel[grid](x, num_columns, cap, IS_SOFT=is_soft, BLOCK=_BLOCK)
    return x


@triton.jit
def _bounding_kernel(x_ptr, num_columns, cap, IS_SOFT: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = x_ptr + tl.program_id(0).to(tl.int64) * num_columns + columns
    x = tl.load(at, mask=columns < num_columns, other=0.0)
    if IS_SOFT:
        # tanh(z) is 2 sigmoid(2 z) - 1.
        y = cap * (2.0 * tl.sigmoid(2.0 * x / cap) - 1.0)
    else:  # a NaN stays one
        y = tl.where(x > cap, cap, tl.where(x < -cap, -cap, x))
    tl.store(at, y, mask=columns < num_columns)


@triton.jit
def _activation_kernel(
    x_ptr,
    y_ptr,
    row_codes_ptr,
    row_scales_ptr,
    outliers_ptr,
    stride,
    most_outliers,
    fixed_scale,
    num_columns,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
    ELEMENT: tl.constexpr,
    CODES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < num_columns
    source = x_ptr + row * (2 if IS_GATED else 1) * num_columns + columns
    gate = tl.load(source, mask=is_column, other=0.0).to(tl.float32)
    if ACTIVATION == "clamped_swiglu":
        gate = tl.where(gate > 7.0, 7.0, gate)
    if ACTIVATION == "gelu":
        activated = gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == "relu":
        activated = tl.where(gate < 0.0, 0.0, gate)  # a NaN stays one
    elif ACTIVATION == "relu2":
        activated = tl.where(gate < 0.0, 0.0, gate * gate)
    else:
        # gelu_tanh: (1 + tanh(z)) / 2 is sigmoid(2 z); 1.5957... is 2 sqrt(2 / pi).
        slope = 1.702 if ACTIVATION == "clamped_swiglu" else 1.0
        if ACTIVATION == "gelu_tanh":
            slope = 1.5957691216057308 * (1.0 + 0.044715 * gate * gate)
        z = gate * slope
        decay = tl.exp(-tl.abs(z))
        activated = gate * (tl.where(z >= 0.0, 1.0, decay) / (1.0 + decay))
    if IS_GATED:
        up = tl.load(source + num_columns, mask=is_column, other=0.0).to(tl.float32)
        if ACTIVATION == "clamped_swiglu":
            up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
        activated *= up
    store_row(
        activated,
        row,
        columns,
        num_columns,
        y_ptr,
        row_codes_ptr,
        row_scales_ptr,
        outliers_ptr,
        stride,
        most_outliers,
        fixed_scale,
        ELEMENT,
        CODES,
    )
