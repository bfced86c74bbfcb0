"""Products of int8 and fp8 weights and rows that are quantised as the weights are (W8A8)."""

from __future__ import annotations

import torch
from torch import Tensor

from lmi_core.ops.device.packed_weight import PackedWeight
from lmi_core.ops.device.quantized_rows import LEAST_MAGNITUDE, MOST, QuantizedRows, RowFormat

EXACT_INPUTS = 1024
"""So many products of int8 codes sum to less than 2^24, exact in fp32 whatever the order."""


def linear_quantized(
    x: Tensor | QuantizedRows, weight: PackedWeight, bias: Tensor | None
) -> Tensor:
    """x @ weight^T + bias, x rounded row by row to the weight's type: [R, k] -> fp32 [R, n]; bias
    is fp32. Rows may come quantised.

    int8: to the bit what the CPU engine computes. Weights are unpacked anew at every call."""
    assert weight.format != "int4"
    rows = x if isinstance(x, QuantizedRows) else quantize_rows(x, weight.format)
    num_rows = len(rows.scales)
    is_int8 = weight.format == "int8"
    dtype = torch.int32 if is_int8 else torch.float32
    sums = torch.zeros(num_rows, weight.num_outputs, dtype=dtype, device=rows.scales.device)
    for first in range(0, weight.num_inputs, EXACT_INPUTS):
        end = min(first + EXACT_INPUTS, weight.num_inputs)
        sums += (rows.codes[:, first:end].float() @ weight.codes(first, end).T).to(sums.dtype)
    y = sums.float() * (weight.scales() * rows.scales.unsqueeze(1))
    return y if bias is None else y + bias


def quantize_rows(x: Tensor, format: RowFormat) -> QuantizedRows:
    """Each row's nearest codes, ties to even, its largest magnitude the largest."""
    rows = QuantizedRows.empty_for(x, format)
    most = MOST[rows.codes.dtype]
    values = x.float()
    largest = values.abs().amax(1)
    # On a GPU, torch multiplies by the reciprocal of a plain number.
    scales = largest / torch.full_like(largest, most)
    scales = torch.where(largest < LEAST_MAGNITUDE, 0.0, scales)
    rows.scales.copy_(torch.where(values.isfinite().all(1), scales, torch.nan))
    inverse = torch.where(rows.scales > 0, 1 / rows.scales, 0.0).unsqueeze(1)
    codes = torch.where(inverse > 0, values * inverse, 0.0).clamp(-most, most)
    rows.codes.zero_()
    rows.codes[:, : x.shape[1]] = (codes.round() if format == "int8" else codes).to(
        rows.codes.dtype
    )
    return rows
