"""int4 and int8 weights on a torch device, in the panels of ``csrc/cpu/kernels.h``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
    format: Literal["int8", "int4"]
    num_outputs: int
    num_inputs: int
    group_size: int
    """Inputs per scale; 0: a scale per output."""
    is_gated: bool

    @property
    def num_bytes(self) -> int:
        return self.panels.numel()

    @property
    def num_panels(self) -> int:
        num_parts = 2 if self.is_gated else 1
        return num_parts * -(-self.num_outputs // num_parts // PANEL_OUTPUTS)

    @property
    def quantizes_inputs(self) -> bool:
        """Whether products are of codes on both sides (``linear_quantized``)."""
        return self.format == "int8"

    def unpack(self) -> Tensor:
        """The matrix in fp32, gate above up."""
        if self.format == "int8":
            return self.codes(0, self.num_inputs) * self.scales().unsqueeze(1)
        return self._in_order(self._int4()[:, : self.num_inputs])

    def codes(self, first: int, end: int) -> Tensor:
        """Of inputs ``first``, a multiple of 4, to ``end``: whole numbers in fp32, [outputs, end -
        first]. int8 only."""
        steps = self.panels.view(self.num_panels, -1)[:, HEADER_BYTES:]
        steps = steps[:, first // 4 * STEP_BYTES : -(-end // 4) * STEP_BYTES]
        codes = steps.reshape(self.num_panels, -1, PANEL_OUTPUTS, 4).transpose(1, 2)
        rows = codes.reshape(self.num_panels * PANEL_OUTPUTS, -1)[:, : end - first]
        return self._in_order(rows.float() - _INT8_ZERO)

    def scales(self) -> Tensor:
        """One per output, fp32. int8 only."""
        headers = self.panels.view(self.num_panels, -1)[:, :HEADER_BYTES]
        return self._in_order(headers.contiguous().view(torch.float32).view(-1, 1)).squeeze(1)

    def _int4(self) -> Tensor:
        """[panels * 16, inputs and padding]"""
        group_bytes = HEADER_BYTES + self.group_size // 8 * STEP_BYTES
        groups = self.panels.view(self.num_panels, -1, group_bytes)
        header = groups[..., :HEADER_BYTES].contiguous().view(torch.float16).float()
        scales, zeros = header.view(self.num_panels, -1, 2, 1, PANEL_OUTPUTS, 1).unbind(2)
        words = groups[..., HEADER_BYTES:].reshape(*groups.shape[:2], -1, PANEL_OUTPUTS, 4)
        codes = torch.cat((words & 15, words >> 4), dim=-1)
        weights = (codes.float() - zeros) * scales
        return weights.permute(0, 3, 1, 2, 4).reshape(self.num_panels * PANEL_OUTPUTS, -1)

    def _in_order(self, rows: Tensor) -> Tensor:
        """Rows of panels [panels * 16, n] without padding, gate above up."""
        if not self.is_gated:
            return rows[: self.num_outputs]
        columns = rows.shape[1]
        parts = rows.view(-1, 2, PANEL_OUTPUTS, columns).transpose(0, 1)
        return parts.reshape(2, -1, columns)[:, : self.num_outputs // 2].flatten(0, 1)
