"""Products of int8 and fp8 weights and rows that are quantised as the weights are (W8A8)."""

from __future__ import annotations

import torch
from torch import Tensor

from lmi_core.ops.device.packed_weight import PackedWeight
from lmi_core.ops.device.quantized_rows import (
    LEAST_MAGNITUDE,
    MOST,
    OCTAVES,
    QuantizedRows,
    RowFormat,
    fixed_scale,
    kind_of,
    max_outliers,
)

EXACT_INPUTS = 1024
"""So many products of int8 codes sum to less than 2^24, exact in fp32 whatever the order."""


def linear_quantized(
    x: Tensor | QuantizedRows, weight: PackedWeight, bias: Tensor | None
) -> Tensor:
    """x @ weight^T + bias, x rounded row by row to the weight's type: [R, k] -> fp32 [R, n]; bias
    is fp32. Rows may come quantised. int8: to the bit what the CPU engine computes. Here weights
    are unpacked anew at every call."""
    assert weight.row_format is not None
    rows = x if isinstance(x, QuantizedRows) else quantize_rows(x, weight.row_format)
    y = _sums(rows.codes, weight)
    if rows.outliers is not None:
        y += 256 * _sums(_high_digits(rows), weight)
    y *= weight.scales() * rows.scales.unsqueeze(1)
    return y if bias is None else y + bias


def _sums(codes: Tensor, weight: PackedWeight) -> Tensor:
    """Of products with the weight's codes, fp32 [R, n]; of int8 exact before they are rounded."""
    dtype = torch.int32 if weight.format == "int8" else torch.float32
    sums = torch.zeros(len(codes), weight.num_outputs, dtype=dtype, device=codes.device)
    for first in range(0, weight.num_inputs, EXACT_INPUTS):
        end = min(first + EXACT_INPUTS, weight.num_inputs)
        sums += (codes[:, first:end].float() @ weight.codes(first, end).T).to(sums.dtype)
    return sums.float()


def quantize_rows(x: Tensor, format: RowFormat) -> QuantizedRows:
    """The nearest codes of each row of x [R, n], ties to even; its largest magnitude is the largest
    code's, but for outliers and scales that are fixed."""
    rows, kind = QuantizedRows.empty_for(x, format), kind_of(format)
    most = MOST[rows.codes.dtype]
    sizes = x.float().abs()
    largest = sizes.amax(1)
    codable = largest if kind != "outliers" else _largest_but_outliers(sizes, largest)
    # On a GPU, torch multiplies by the reciprocal of a plain number.
    scales = codable / torch.full_like(largest, most)
    if fixed := fixed_scale(format):
        scales.fill_(fixed)
    scales = torch.where(largest < LEAST_MAGNITUDE, 0.0, scales)
    rows.scales.copy_(torch.where(sizes.isfinite().all(1), scales, torch.nan))
    inverse = torch.where(rows.scales > 0, 1 / rows.scales, 0.0).unsqueeze(1)
    codes = torch.where(inverse > 0, x.float() * inverse, 0.0)
    rows.codes.zero_()
    if kind == "fp8":
        codes = codes.clamp(-most, most)
    elif rows.outliers is None:
        codes = codes.round().clamp(-most, most)
    else:
        codes = codes.round().clamp(-256 * most, 256 * most)
        _list_outliers(((codes + 128) / 256).floor().int(), rows.outliers)
        codes = (codes + 128).remainder(256) - 128
    rows.codes[:, : x.shape[1]] = codes.to(rows.codes.dtype)
    return rows


def _largest_but_outliers(sizes: Tensor, largest: Tensor) -> Tensor:
    """Of each row [R, columns]: the magnitude that the largest code of 8 bits stands for."""
    most = max_outliers(sizes.shape[1])
    thresholds = largest.unsqueeze(1) / torch.tensor(
        [2.0**octaves for octaves in OCTAVES], device=sizes.device
    )
    reaching = torch.stack([(sizes >= t.unsqueeze(1)).sum(1) for t in thresholds.unbind(1)], 1)
    num_allowed = (reaching <= most).sum(1, keepdim=True)
    threshold = 2 * thresholds.gather(1, (num_allowed - 1).clamp(min=0))
    below = torch.where(sizes < threshold, sizes, 0.0).amax(1)
    finest = 2 * thresholds[:, -1]
    return torch.where(num_allowed.squeeze(1) > 0, torch.maximum(below, finest), largest)


def _list_outliers(high: Tensor, outliers: Tensor) -> None:
    """The high digits [R, columns] that aren't 0, as ``QuantizedRows`` has them."""
    outliers.zero_()
    is_outlier = high != 0
    outliers[:, 0] = is_outlier.sum(1)
    rows, columns = is_outlier.nonzero(as_tuple=True)
    places = is_outlier.cumsum(1)[rows, columns]
    outliers[rows, places] = ((columns << 8) | (high[rows, columns] & 0xFF)).int()


def _high_digits(rows: QuantizedRows) -> Tensor:
    """int8 like the codes."""
    assert rows.outliers is not None
    high = torch.zeros_like(rows.codes)
    entries = rows.outliers[:, 1:]
    places = torch.arange(entries.shape[1], device=entries.device)
    row, place = (places < rows.outliers[:, :1]).nonzero(as_tuple=True)
    found = entries[row, place]
    high[row, found.long() >> 8] = (((found & 0xFF) ^ 128) - 128).to(torch.int8)
    return high
