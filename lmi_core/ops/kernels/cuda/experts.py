"""A mixture of experts: routing, rows by expert, and products with all matrices, for which the
host waits for nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lmi_core.ops.device.expert_rows import ExpertRows, ExpertTable
from lmi_core.ops.device.packed_weight import PackedWeight
from lmi_core.ops.kernels.cuda import library
from lmi_core.ops.kernels.cuda.linear import DTYPES
from lmi_core.ops.kernels.cuda.linear_quantized import quantize_rows
from lmi_core.ops.kernels.cuda.results import outlier_stride
from lmi_core.ops.kernels.fallback import fallback

SCORINGS = {"softmax": 0, "sigmoid": 1, "sparsemixer": 2}
MAX_EXPERTS, MAX_GROUPS = 512, 32
"""LMI_MAX_EXPERTS, LMI_MAX_EXPERT_GROUPS."""


def route(logits: Tensor, *, scoring: str, normalizes: bool, **settings: Any) -> Tensor:
    """As ``torch_ops`` has it."""
    num_tokens, num_experts = logits.shape
    reason = routing_not_covered(num_experts, settings["num_groups"])
    if reason:
        other = fallback("route", logits.device, reason)
        result: Tensor = other(logits, scoring=scoring, normalizes=normalizes, **settings)
        return result
    y = logits.new_empty(num_tokens, 2 * settings["top_k"])
    library.call(
        "route",
        y,
        logits=logits,
        y=y,
        num_rows=num_tokens,
        num_experts=num_experts,
        scoring=SCORINGS[scoring],
        normalizes=normalizes,
        **settings,
    )
    return y


def routing_not_covered(num_experts: int, num_groups: int) -> str:
    """What of these the kernel has not; "": it has both."""
    if num_experts > MAX_EXPERTS:
        return f"routing among {num_experts} experts"
    return f"{num_groups} groups of experts" if num_groups > MAX_GROUPS else ""


def group_rows(routes: Tensor, num_experts: int) -> ExpertRows:
    """As ``torch_ops`` has it."""
    num_tokens, top_k = routes.shape[0], routes.shape[1] // 2
    num_rows = num_tokens * top_k
    numbers = torch.empty(2 * num_rows + num_experts + 1, dtype=torch.int32, device=routes.device)
    token_rows, places = numbers[:num_rows], numbers[num_rows : 2 * num_rows]
    first_rows = numbers[2 * num_rows :]
    library.call(
        "group_rows",
        routes,
        routes=routes,
        token_rows=token_rows,
        places=places,
        first_rows=first_rows,
        num_rows=num_tokens,
        num_experts=num_experts,
        top_k=top_k,
    )
    return ExpertRows(token_rows, places.view(num_tokens, top_k), first_rows)


def grouped_linear(
    x: Tensor,
    routes: Tensor | None,
    rows: ExpertRows,
    table: ExpertTable,
    bias: Tensor | None,
    *,
    is_by_token: bool,
    sums: Tensor | None = None,
    in_tiles: bool = False,
) -> Tensor | None:
    """As ``torch_ops`` has it. ``in_tiles``: of experts in bf16, few rows are summed as many."""
    reason = not_covered(x.dtype, table)
    if reason:
        other = fallback("grouped_linear", x.device, reason)
        given = (x, routes, rows, table, bias)
        result: Tensor | None = other(*given, is_by_token=is_by_token, sums=sums)
        return result
    weight = table.experts[0]
    y = torch.empty(len(rows.token_rows), weight.num_outputs, dtype=torch.float32, device=x.device)
    name, arguments = _product(x, weight, in_tiles=in_tiles)
    library.call(
        name,
        y,
        bias=bias,
        y=y,
        matrices=table.addresses,
        first_rows=rows.first_rows,
        token_rows=rows.token_rows if is_by_token else None,
        num_experts=len(table.experts),
        num_rows=len(y),
        num_outputs=weight.num_outputs,
        num_inputs=weight.num_inputs,
        **arguments,
    )
    if sums is None:
        return y
    assert routes is not None
    library.call(
        "add_experts",
        y,
        y=y,
        routes=routes,
        places=rows.places,
        sums=sums,
        num_rows=len(sums),
        num_columns=weight.num_outputs,
        top_k=rows.places.shape[1],
        adds=1,
    )
    return None


def head_linear(x: Tensor, table: ExpertTable, *, out_dtype: torch.dtype) -> Tensor:
    """As ``torch_ops`` has it."""
    reason = heads_not_covered(x.dtype, table)
    if reason:
        other: Tensor = fallback("head_linear", x.device, reason)(x, table, out_dtype=out_dtype)
        return other
    weight, num_heads = table.experts[0], len(table.experts)
    y = x.new_empty(len(x), num_heads * weight.num_outputs, dtype=out_dtype)
    library.call(
        "head_linear",
        y,
        x=x,
        y=y,
        matrices=table.addresses,
        num_heads=num_heads,
        num_rows=len(x),
        num_outputs=weight.num_outputs,
        num_inputs=weight.num_inputs,
        dtype=x.dtype,
        y_dtype=out_dtype,
    )
    return y


def heads_not_covered(dtype: torch.dtype, table: ExpertTable) -> str:
    """What of these ``head_linear``'s kernel has not; "": it has both. ``table``: of dense ones."""
    weight: Any = table.experts[0]
    stored = weight.matrix.dtype
    if dtype in DTYPES and stored == dtype and table.are_alike:
        return ""
    return f"heads' matrices in {str(stored)[6:]} for {str(dtype)[6:]} rows"


def not_covered(dtype: torch.dtype, table: ExpertTable) -> str:
    """What of these the kernels have not; "": they have it all."""
    weight: Any = table.experts[0]
    if not table.are_alike:
        return "experts in several formats"
    if dtype not in DTYPES:
        return f"experts of {str(dtype)[6:]} rows"
    if not isinstance(weight, PackedWeight) and weight.matrix.dtype != dtype:
        return f"{str(weight.matrix.dtype)[6:]} experts for {str(dtype)[6:]} rows"
    return f"experts of {weight.num_inputs} inputs" if weight.num_inputs % 8 else ""


def _product(x: Tensor, weight: Any, *, in_tiles: bool) -> tuple[str, dict[str, object]]:
    """The kernel, and what it is given beside experts."""
    if not isinstance(weight, PackedWeight):
        return "linear_experts", {"x": x, "dtype": x.dtype, "in_tiles": in_tiles}
    packed: dict[str, object] = {
        "panels": weight.panels,
        "group_size": weight.group_size,
        "is_gated": weight.is_gated,
    }
    if weight.row_format is None:
        return "linear_packed", {"x": x, "dtype": x.dtype, **packed}
    rows = quantize_rows(x, weight.row_format)
    return "linear_quantized", packed | {
        "codes": rows.codes,
        "row_scales": rows.scales,
        "outliers": rows.outliers,
        "stride": rows.codes.shape[1],
        "outlier_stride": outlier_stride(rows),
        "code_type": rows.codes.dtype,
    }
