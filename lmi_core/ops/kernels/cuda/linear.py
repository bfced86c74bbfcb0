"""Matrix products with few rows, or with int4 weights; those of many rows are cuBLASLt's."""

from __future__ import annotations

import torch
from torch import Tensor

from lmi_core.ops.device import packed_weight
from lmi_core.ops.device.packed_weight import PackedWeight
from lmi_core.ops.kernels.cuda import cublaslt, library
from lmi_core.ops.kernels.fallback import fallback
from lmi_core.ops.kernels.torch_ops.linear import linear as torch_linear

MAX_FEW_ROWS = 8
"""LMI_MAX_FEW_ROWS."""
DTYPES = (torch.bfloat16,)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    out_dtype: torch.dtype = torch.float32,
    in_tiles: bool = False,
) -> Tensor:
    """As ``torch_ops`` has it. ``in_tiles``: of bf16, by the one kernel that sums any number of
    rows alike, which is slow where they are few."""
    num_rows, num_inputs = x.shape
    if in_tiles:
        return _dense("linear_tiled", x, weight, bias, out_dtype, y_stride=len(weight))
    if x.dtype not in DTYPES:
        return torch_linear(x, weight, bias, out_dtype=out_dtype)
    if num_rows > MAX_FEW_ROWS or num_inputs % 8 != 0:
        return _linear_of_many_rows(x, weight, bias, out_dtype)
    return _dense("linear_few_rows", x, weight, bias, out_dtype)


def _dense(
    kernel: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    **more: object,
) -> Tensor:
    y = torch.empty(len(x), len(weight), dtype=out_dtype, device=x.device)
    library.call(
        kernel,
        x,
        x=x,
        weight=weight,
        bias=bias,
        y=y,
        num_rows=len(x),
        num_outputs=len(weight),
        num_inputs=x.shape[1],
        dtype=x.dtype,
        y_dtype=out_dtype,
        **more,
    )
    return y


def _linear_of_many_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    reason = cublaslt.unusable_because()
    if reason is None:
        return cublaslt.linear_dense(x, weight, bias, out_dtype=out_dtype)
    other = fallback("linear", x.device, f"cuBLASLt here ({reason})")
    result: Tensor = other(x, weight, bias, out_dtype=out_dtype)
    return result


def linear_packed(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, *, unpacked: Tensor | None = None
) -> Tensor:
    """As ``torch_ops`` has it; many rows are multiplied by cuBLASLt, where it can be had."""
    num_rows, num_inputs = x.shape
    if x.dtype not in DTYPES or num_inputs % 8 != 0:
        reason = f"{str(x.dtype)[6:]} rows of {num_inputs} inputs"
        result: Tensor = fallback("linear_packed", x.device, reason)(x, weight, bias)
        return result
    room: dict[str, object] = {
        "workspace": cublaslt.workspace_of(x.device),
        "workspace_bytes": cublaslt.WORKSPACE_BYTES,
    }
    is_unpacked = False
    if unpacked is not None and num_rows > packed_weight.MAX_PACKED_ROWS and cublaslt.can_unpack():
        is_unpacked = True
        room |= {
            "unpacked": unpacked,
            "unpacked_bytes": weight.unpacked_bytes,
            "max_packed_rows": packed_weight.MAX_PACKED_ROWS,
        }
    y = torch.empty(num_rows, weight.num_outputs, dtype=torch.float32, device=x.device)
    library.call(
        "linear_packed",
        x,
        x=x,
        panels=weight.panels,
        bias=bias,
        y=y,
        **room,
        num_rows=num_rows,
        num_outputs=weight.num_outputs,
        num_inputs=num_inputs,
        group_size=weight.group_size,
        is_gated=weight.is_gated,
        dtype=x.dtype,
    )
    if is_unpacked:
        library.load().log_notices()
    return y
