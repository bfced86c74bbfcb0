"""fp8 weights made for a torch device: quantised there, or as a checkpoint has them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from lmi_core.ops.device.packed_weight import PANEL_OUTPUTS, PackedWeight
from lmi_core.weights.fp8_matrix import FP8_BLOCK, FP8_MOST

Fp8Rows = tuple[Tensor, Tensor]
"""Codes [outputs, inputs] and their scales, fp32 [outputs, 1 or blocks of 128 inputs]."""


def quantize_fp8(matrix: Tensor) -> Fp8Rows:
    """The nearest multiples of the 448th part of a row's largest magnitude: [outputs, inputs]."""
    values = matrix.float()
    scales = values.abs().amax(1, keepdim=True) / FP8_MOST
    scaled = torch.where(scales == 0, 0.0, values / scales).clamp(-FP8_MOST, FP8_MOST)
    return scaled.to(torch.float8_e4m3fn), scales


def pack_fp8(parts: Sequence[Fp8Rows], *, is_gated: bool, row_scale: float = 0.0) -> PackedWeight:
    """The matrix of all parts' outputs; of gate and up if ``is_gated``."""
    num_groups = max(scales.shape[1] for _, scales in parts)
    num_outputs = sum(len(codes) for codes, _ in parts)
    num_inputs = parts[0][0].shape[1]
    codes = _panel_rows([codes.view(torch.uint8) for codes, _ in parts], is_gated)
    scales = _panel_rows([s.expand(-1, num_groups) for _, s in parts], is_gated)
    group = FP8_BLOCK if num_groups > 1 else 4
    codes = pad(codes, (0, -num_inputs % group))
    steps = codes.view(-1, PANEL_OUTPUTS, codes.shape[1] // 4, 4).transpose(1, 2)
    headers = scales.view(-1, PANEL_OUTPUTS, num_groups).transpose(1, 2).contiguous()
    bodies = steps.reshape(len(steps), num_groups, -1)
    return PackedWeight(
        panels=torch.cat((headers.view(torch.uint8), bodies), dim=2).flatten(),
        format="fp8",
        num_outputs=num_outputs,
        num_inputs=num_inputs,
        group_size=FP8_BLOCK if num_groups > 1 else 0,
        is_gated=is_gated,
        row_scale=row_scale,
    )


def _panel_rows(parts: Sequence[Tensor], is_gated: bool) -> Tensor:
    """Rows as panels have them: padded with zeros, those of gate and up by turns of 16."""
    if not is_gated:
        rows = torch.cat(list(parts))
        return pad(rows, (0, 0, 0, -len(rows) % PANEL_OUTPUTS))
    halves = [pad(part, (0, 0, 0, -len(part) % PANEL_OUTPUTS)) for part in parts]
    return torch.stack([half.view(-1, PANEL_OUTPUTS, half.shape[1]) for half in halves], 1).view(
        -1, halves[0].shape[1]
    )
