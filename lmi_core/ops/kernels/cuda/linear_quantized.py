"""Products of int8 and fp8 weights and rows that are quantised as the weights are (W8A8)."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from lmi_core.ops.device import packed_weight
from lmi_core.ops.device.packed_weight import PackedWeight
from lmi_core.ops.device.quantized_rows import QuantizedRows, RowFormat
from lmi_core.ops.kernels.cuda import cublaslt, library
from lmi_core.ops.kernels.cuda.results import outlier_stride, results_like


def linear_quantized(
    x: Tensor | QuantizedRows, weight: PackedWeight, bias: Tensor | None
) -> Tensor:
    """As ``torch_ops`` has it."""
    assert weight.row_format is not None
    rows = x if isinstance(x, QuantizedRows) else quantize_rows(x, weight.row_format)
    num_rows = len(rows.scales)
    y = rows.scales.new_empty(num_rows, weight.num_outputs)
    room = _room_to_unpack(weight, y)
    library.call(
        "linear_quantized",
        y,
        codes=rows.codes,
        row_scales=rows.scales,
        outliers=rows.outliers,
        panels=weight.panels,
        bias=bias,
        y=y,
        num_rows=num_rows,
        num_outputs=weight.num_outputs,
        num_inputs=weight.num_inputs,
        stride=rows.codes.shape[1],
        outlier_stride=outlier_stride(rows),
        group_size=weight.group_size,
        is_gated=weight.is_gated,
        code_type=rows.codes.dtype,
        **room,
    )
    if room:
        library.load().log_notices()
    return y


def _room_to_unpack(weight: PackedWeight, y: Tensor) -> dict[str, object]:
    """Arguments for products of so many rows that cuBLASLt makes them; else none."""
    num_bytes, most = weight.unpacked_bytes, packed_weight.MAX_PANEL_ROWS[weight.format]
    if len(y) <= most or not num_bytes or not cublaslt.can_unpack():
        return {}
    return {
        "unpacked": y.new_empty(num_bytes, dtype=torch.uint8),
        "unpacked_bytes": num_bytes,
        "max_panel_rows": most,
        "workspace": cublaslt.workspace_of(y.device),
        "workspace_bytes": cublaslt.WORKSPACE_BYTES,
    }


def quantize_rows(x: Tensor, format: RowFormat) -> QuantizedRows:
    """As ``torch_ops`` has it, of fp32 or bf16."""
    rows, named = results_like(x, x.shape[1], x.dtype, format)
    library.call(
        "quantize_rows",
        x,
        x=x,
        num_rows=len(x),
        num_columns=x.shape[1],
        dtype=x.dtype,
        **named,
    )
    return cast(QuantizedRows, rows)
