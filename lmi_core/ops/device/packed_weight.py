"""Quantised weights on a torch device, in the panels of ``csrc/cpu/packed_linear.h``.

fp8 ones, which the CPU doesn't have, lie as int8 ones do: 16 fp32 scales, then [inputs / 4][16][4]
bytes of e4m3. Those with scales of blocks have such a panel for every 128 inputs, padded to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lmi_core.ops.device.quantized_rows import RowFormat, StaticFp8, stride_of
from lmi_core.weights.formats import RowRounding

PANEL_OUTPUTS = 16
HEADER_BYTES = 64
STEP_BYTES = 64
"""Of the 16 outputs' next 8 inputs (int4) or 4."""
MAX_PACKED_ROWS = 256
"""More rows unpack an int4 weight into 16 bits first, for a dense product: found on an H100
for the CUDA kernels, and taken for Triton's."""
MAX_PANEL_ROWS = {"int8": 64, "fp8": 64}
"""More rows lay a weight's codes out as rows first, for a product by cuBLASLt: found on an H100."""
MAX_UNPACKED_BYTES = 256 << 20
"""Of a weight at a time; larger ones in slices of outputs. Those of layers up to 4096 x 32768 are
whole, and a slice is still wide enough for a product that keeps the device busy."""
_INT8_ZERO = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """Matrix [num_outputs, num_inputs] as ``_native.LinearWeight.packed`` or ``pack_fp8`` gives it;
    a gated one holds gate and up."""

    panels: Tensor
    """uint8, flat, on 16 bytes."""
    format: Literal["int8", "int4", "fp8"]
    num_outputs: int
    num_inputs: int
    group_size: int
    """Inputs per scale; 0: a scale per output."""
    is_gated: bool
    rounding: RowRounding = "outliers"
    """Of the rows that int8 weights are multiplied with."""
    row_scale: float = 0.0
    """Of all rows that fp8 ones are multiplied with; 0: each has its own."""

    @property
    def num_bytes(self) -> int:
        return self.panels.numel()

    @property
    def num_panels(self) -> int:
        num_parts = 2 if self.is_gated else 1
        return num_parts * -(-self.num_outputs // num_parts // PANEL_OUTPUTS)

    @property
    def row_format(self) -> RowFormat | None:
        """That rows are rounded to before products (``linear_quantized``); None: as they are."""
        if self.format == "int8":
            assert self.rounding in ("int8", "outliers"), "others have no kernel"
            return "int8" if self.rounding == "int8" else "outliers"
        if self.row_scale:
            return StaticFp8(self.row_scale)
        return None if self.format == "int4" else self.format

    @property
    def unpacked_bytes(self) -> int:
        """That a product of many rows wants for weights or codes as rows; 0: in panels always."""
        if self.format == "int4":
            return min(2 * self.num_outputs * self.num_inputs, MAX_UNPACKED_BYTES)
        if self.group_size:
            return 0
        return min(self.num_outputs * stride_of(self.num_inputs), MAX_UNPACKED_BYTES)

    def unpack(self) -> Tensor:
        """The matrix in fp32 [outputs, inputs], gate above up."""
        if self.format == "int4":
            return self._in_order(self._int4()[:, : self.num_inputs])
        return self.codes(0, self.num_inputs) * self.scales().unsqueeze(1)

    def codes(self, first: int, end: int) -> Tensor:
        """What the bytes of inputs ``first``, a multiple of 128, to ``end`` stand for, in fp32
        [outputs, end - first]: times the scales of their blocks, but not those of ``scales``."""
        groups = self._groups()
        if self.group_size:
            groups = groups[:, first // self.group_size : -(-end // self.group_size)]
        steps = groups[..., HEADER_BYTES:]
        if not self.group_size:
            steps = steps[..., first // 4 * STEP_BYTES : -(-end // 4) * STEP_BYTES]
        codes = steps.reshape(self.num_panels, groups.shape[1], -1, PANEL_OUTPUTS, 4)
        if self.format == "int8":
            values = codes.float() - _INT8_ZERO
        else:
            values = codes.view(torch.float8_e4m3fn).float()
        if self.group_size:
            header = groups[..., :HEADER_BYTES].contiguous().view(torch.float32)
            values *= header.view(self.num_panels, -1, 1, PANEL_OUTPUTS, 1)
        rows = values.permute(0, 3, 1, 2, 4).reshape(self.num_panels * PANEL_OUTPUTS, -1)
        return self._in_order(rows[:, : end - first])

    def scales(self) -> Tensor:
        """fp32 [outputs]; 1 where they are of blocks."""
        if self.group_size:
            return torch.ones(self.num_outputs, device=self.panels.device)
        headers = self._groups()[:, 0, :HEADER_BYTES]
        return self._in_order(headers.contiguous().view(torch.float32).view(-1, 1)).squeeze(1)

    def _groups(self) -> Tensor:
        """[panels, groups, bytes] of all formats but int4."""
        steps = -(-self.num_inputs // 4) if self.group_size == 0 else self.group_size // 4
        return self.panels.view(self.num_panels, -1, HEADER_BYTES + steps * STEP_BYTES)

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
