"""Products of int8 and fp8 weights and rows that are quantised as the weights are (W8A8)."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from lmi_core.ops.device.packed_weight import PackedWeight
from lmi_core.ops.device.quantized_rows import QuantizedRows, RowFormat
from lmi_core.ops.kernels.cuda import library
from lmi_core.ops.kernels.cuda.results import outlier_stride, results_like


def linear_quantized(
    x: Tensor | QuantizedRows, weight: PackedWeight, bias: Tensor | None
) -> Tensor:
    """x @ weight^T + bias, x rounded row by row to the weight's type: [R, k] -> fp32 [R, n]; bias
    is fp32. Rows may come quantised."""
    assert weight.row_format is not None
    rows = x if isinstance(x, QuantizedRows) else quantize_rows(x, weight.row_format)
    num_rows = len(rows.scales)
    y = rows.scales.new_empty(num_rows, weight.num_outputs)
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
    )
    return y


def quantize_rows(x: Tensor, format: RowFormat) -> QuantizedRows:
    """x [R, n] in fp32 or bf16."""
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
