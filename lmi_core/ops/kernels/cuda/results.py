"""What kernels give that can quantise their results: rows of numbers, or of codes."""

from __future__ import annotations

import torch
from torch import Tensor

from lmi_core.ops.device.quantized_rows import QuantizedRows, RowFormat, fixed_scale


def results_like(
    x: Tensor, num_columns: int, dtype: torch.dtype, codes: RowFormat | None
) -> tuple[Tensor | QuantizedRows, dict[str, object]]:
    """Room for as many rows as x has, on its device, and the kernel's arguments that name it."""
    if codes is None:
        y = x.new_empty(len(x), num_columns, dtype=dtype)
        return y, {"y": y}
    rows = QuantizedRows.empty(len(x), num_columns, codes, x.device)
    return rows, {
        "codes": rows.codes,
        "scales": rows.scales,
        "outliers": rows.outliers,
        "stride": rows.codes.shape[1],
        "outlier_stride": outlier_stride(rows),
        "code_type": rows.codes.dtype,
        "fixed_scale": fixed_scale(codes),
    }


def outlier_stride(rows: QuantizedRows) -> int:
    """Of the lists; 0: there are none."""
    return 0 if rows.outliers is None else rows.outliers.shape[1]
