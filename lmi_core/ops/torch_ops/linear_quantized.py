"""Products of int8 weights and rows that are quantised on the way (W8A8)."""

from __future__ import annotations

import torch
from torch import Tensor

from lmi_core.ops.packed_weight import PackedWeight
from lmi_core.ops.quantized_rows import INT8_MOST, LEAST_MAGNITUDE, QuantizedRows

EXACT_INPUTS = 1024
"""So many products of int8 codes sum to less than 2^24, exact in fp32 whatever the order."""


def linear_quantized(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """x @ weight^T + bias, x rounded to int8 row by row: [R, k] -> fp32 [R, n]; bias is fp32.

    To the bit what the CPU engine computes. Weights are unpacked anew at every call."""
    rows = quantize_rows(x)
    sums = torch.zeros(len(x), weight.num_outputs, dtype=torch.int32, device=x.device)
    for first in range(0, weight.num_inputs, EXACT_INPUTS):
        end = min(first + EXACT_INPUTS, weight.num_inputs)
        product = rows.codes[:, first:end].float() @ weight.codes(first, end).T
        sums += product.to(torch.int32)
    y = sums.float() * (weight.scales() * rows.scales.unsqueeze(1))
    return y if bias is None else y + bias


def quantize_rows(x: Tensor) -> QuantizedRows:
    """Each row's nearest multiples, ties to even, of its largest magnitude's 127th part."""
    rows = QuantizedRows.empty_for(x)
    values = x.float()
    most = values.abs().amax(1)
    scales = torch.where(most < LEAST_MAGNITUDE, 0.0, most / INT8_MOST)
    rows.scales.copy_(torch.where(values.isfinite().all(1), scales, torch.nan))
    inverse = torch.where(rows.scales > 0, 1 / rows.scales, 0.0).unsqueeze(1)
    codes = torch.where(inverse > 0, values * inverse, 0.0).clamp(-INT8_MOST, INT8_MOST).round()
    rows.codes.zero_()
    rows.codes[:, : x.shape[1]] = codes.to(torch.int8)
    return rows
