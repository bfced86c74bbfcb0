"""int4 and int8 weights on a torch device, in the panels of ``csrc/cpu/kernels.h``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PANEL_OUTPUTS = 16
HEADER_BYTES = 64
STEP_BYTES = 64
"""Of the 16 outputs' next 8 inputs (int4) or 4 (int8)."""
_INT8_ZERO = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """Matrix [num_outputs, num_inputs] as ``_native.LinearWeight.packed`` gives it; a gated one
    holds gate and up."""

    panels: Tensor
    """uint8, flat, on 16 bytes."""
    num_outputs: int
    num_inputs: int
    group_size: int
    """Inputs per scale; 0: int8, with a scale per output."""
    is_gated: bool

    @property
    def num_bytes(self) -> int:
        return self.panels.numel()

    @property
    def num_panels(self) -> int:
        num_parts = 2 if self.is_gated else 1
        return num_parts * -(-self.num_outputs // num_parts // PANEL_OUTPUTS)

    def unpack(self) -> Tensor:
        """The matrix in fp32, gate above up."""
        rows = self._int8() if self.group_size == 0 else self._int4()
        rows = rows[:, : self.num_inputs]
        if not self.is_gated:
            return rows[: self.num_outputs]
        parts = rows.view(-1, 2, PANEL_OUTPUTS, self.num_inputs).transpose(0, 1)
        return parts.reshape(2, -1, self.num_inputs)[:, : self.num_outputs // 2].flatten(0, 1)

    def _int8(self) -> Tensor:
        """[panels * 16, inputs and padding]"""
        panels = self.panels.view(self.num_panels, -1)
        scales = panels[:, :HEADER_BYTES].contiguous().view(torch.float32)
        codes = panels[:, HEADER_BYTES:].view(self.num_panels, -1, PANEL_OUTPUTS, 4)
        weights = (codes.float() - _INT8_ZERO) * scales.view(-1, 1, PANEL_OUTPUTS, 1)
        return weights.transpose(1, 2).reshape(self.num_panels * PANEL_OUTPUTS, -1)

    def _int4(self) -> Tensor:
        group_bytes = HEADER_BYTES + self.group_size // 8 * STEP_BYTES
        groups = self.panels.view(self.num_panels, -1, group_bytes)
        header = groups[..., :HEADER_BYTES].contiguous().view(torch.float16).float()
        scales, zeros = header.view(self.num_panels, -1, 2, 1, PANEL_OUTPUTS, 1).unbind(2)
        words = groups[..., HEADER_BYTES:].reshape(*groups.shape[:2], -1, PANEL_OUTPUTS, 4)
        codes = torch.cat((words & 15, words >> 4), dim=-1)
        weights = (codes.float() - zeros) * scales
        return weights.permute(0, 3, 1, 2, 4).reshape(self.num_panels * PANEL_OUTPUTS, -1)
