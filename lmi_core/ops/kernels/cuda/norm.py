"""Root mean square normalisation, and others, of rows and of heads."""

from __future__ import annotations

import torch
from torch import Tensor

from lmi_core.ops.device.quantized_rows import QuantizedRows, RowFormat
from lmi_core.ops.kernels.cuda import library
from lmi_core.ops.kernels.cuda.linear_quantized import quantize_rows
from lmi_core.ops.kernels.cuda.results import results_like
from lmi_core.ops.kernels.fallback import fallback

MAX_COLUMNS = 16384
"""LMI_MAX_NORM_COLUMNS; a quarter of it for rows that are no multiple of 4."""


KINDS = {"none": 0, "rms": 1, "layer": 2}
"""LMI_NORM_..."""


def most_columns(num_columns: int) -> int:
    """The most columns of rows of which these are a multiple, or no multiple, of 4."""
    return MAX_COLUMNS if num_columns % 4 == 0 else MAX_COLUMNS // 4


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    out_dtype: torch.dtype,
    addend: Tensor | None = None,
    codes: RowFormat | None = None,
) -> Tensor | QuantizedRows:
    """As ``torch_ops`` has it."""
    num_rows, num_columns = x.shape
    if num_columns > most_columns(num_columns):
        other = fallback("rms_norm", x.device, f"rows of {num_columns} columns")
        result: Tensor | QuantizedRows = other(
            x, weight, eps, out_dtype=out_dtype, addend=addend, codes=codes
        )
        return result
    y, named = results_like(x, num_columns, out_dtype, codes)
    library.call(
        "rms_norm",
        x,
        x=x,
        addend=addend,
        weight=weight,
        num_rows=num_rows,
        num_columns=num_columns,
        eps=eps,
        y_dtype=out_dtype,
        **named,
    )
    return y


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    kind: str,
    out_dtype: torch.dtype,
    addend: Tensor | None = None,
    codes: RowFormat | None = None,
) -> Tensor | QuantizedRows:
    """As ``torch_ops`` has it."""
    num_rows, num_columns = x.shape
    if num_columns > most_columns(num_columns):
        other = fallback("norm", x.device, f"rows of {num_columns} columns")
        result: Tensor | QuantizedRows = other(
            x, weight, bias, eps, kind=kind, out_dtype=out_dtype, addend=addend, codes=codes
        )
        return result
    y = torch.empty_like(x, dtype=out_dtype)
    library.call(
        "norm",
        x,
        x=x,
        addend=addend,
        weight=weight,
        bias=bias,
        y=y,
        num_rows=num_rows,
        num_groups=1,
        num_columns=num_columns,
        stride=num_columns,
        kind=KINDS[kind],
        eps=eps,
        y_dtype=out_dtype,
    )
    return y if codes is None else quantize_rows(y, codes)


def norm_heads(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    kind: str,
    first_column: int,
    num_groups: int,
) -> Tensor:
    """As ``torch_ops`` has it."""
    settings = {"kind": kind, "first_column": first_column, "num_groups": num_groups}
    num_columns = weight.numel() // num_groups
    if num_columns > most_columns(num_columns):
        other = fallback("norm_heads", x.device, f"groups of {num_columns} columns")
        result: Tensor = other(x, weight, bias, eps, **settings)
        return result
    library.call(
        "norm",
        x,
        x=x,
        weight=weight,
        bias=bias,
        y=x,
        num_rows=len(x),
        num_columns=num_columns,
        stride=x.shape[1],
        eps=eps,
        y_dtype=x.dtype,
        **{**settings, "kind": KINDS[kind]},
    )
    return x
