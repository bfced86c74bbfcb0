"""A mixture of experts without the host: routing, rows by expert, and products with all matrices.

Tiles of rows are found on the device: a launch has as many as the most that so many rows can fall
into. Matrices lie where they were loaded to, one address each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmi_core.ops.device.expert_rows import ExpertRows, ExpertTable, heads_of_rows
from lmi_core.ops.device.packed_weight import PackedWeight
from lmi_core.ops.kernels.triton.expert_tile import own_place, product_rows
from lmi_core.ops.kernels.triton.linear import launch_packed
from lmi_core.ops.kernels.triton.linear_quantized import launch_quantized
from lmi_core.ops.kernels.triton.routing import route

__all__ = ["group_rows", "grouped_linear", "head_linear", "route"]

FEW_ROWS = 16
MANY_ROWS = 64
BLOCK_OUTPUTS = 64
BLOCK_INPUTS = 64
_BLOCK_CHOICES = 1024
_BLOCK_COLUMNS = 1024


def group_rows(routes: Tensor, num_experts: int) -> ExpertRows:
    """As ``torch_ops`` has it."""
    num_tokens, top_k = routes.shape[0], routes.shape[1] // 2
    num_rows = num_tokens * top_k
    numbers = torch.empty(2 * num_rows + num_experts + 1, dtype=torch.int32, device=routes.device)
    token_rows, places, first_rows = numbers.split((num_rows, num_rows, num_experts + 1))
    _group_kernel[(num_experts + 1,)](
        routes, token_rows, places, first_rows, num_rows, TOP_K=top_k, BLOCK=_BLOCK_CHOICES
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
    block_rows: int = 0,
) -> Tensor | None:
    """As ``torch_ops`` has it. ``block_rows``: that a program takes; 0: by the number of rows."""
    if not table.are_alike:
        from lmi_core.ops.kernels.torch_ops.experts import grouped_linear as one_by_one

        return one_by_one(x, routes, rows, table, bias, is_by_token=is_by_token, sums=sums)
    y = torch.empty(
        len(rows.token_rows), table.experts[0].num_outputs, dtype=torch.float32, device=x.device
    )
    if len(y):
        _multiply(x, rows, table, bias, y, is_by_token, block_rows)
    if sums is None:
        return y
    assert routes is not None
    _combine(y, routes, rows, sums)
    return None


def head_linear(
    x: Tensor, table: ExpertTable, *, out_dtype: torch.dtype, block_rows: int = 0
) -> Tensor:
    """As ``torch_ops`` has it, by heads as experts that every row has. ``block_rows``: as of
    ``grouped_linear``."""
    if not table.are_alike:
        from lmi_core.ops.kernels.torch_ops.experts import head_linear as one_by_one

        return one_by_one(x, table, out_dtype=out_dtype)
    num_heads, weight = len(table.experts), table.experts[0]
    rows = heads_of_rows(len(x), num_heads, x.device)
    each = x.view(-1, weight.num_inputs)
    y = grouped_linear(each, None, rows, table, None, is_by_token=True, block_rows=block_rows)
    assert y is not None
    by_head = y.to(out_dtype).view(num_heads, -1, weight.num_outputs)
    return by_head.transpose(0, 1).flatten(1)


def _multiply(
    x: Tensor,
    rows: ExpertRows,
    table: ExpertTable,
    bias: Tensor | None,
    y: Tensor,
    is_by_token: bool,
    block_rows: int,
) -> None:
    num_rows, num_experts = len(y), len(table.experts)
    block_rows = block_rows or (FEW_ROWS if num_rows <= FEW_ROWS * num_experts else MANY_ROWS)
    # An expert's last tile need not be full.
    num_tiles = min(num_experts, num_rows) + num_rows // block_rows
    sizes = {
        "NUM_EXPERTS": num_experts,
        "BLOCK_EXPERTS": triton.next_power_of_2(num_experts),
        "IS_BY_TOKEN": is_by_token,
        "BLOCK_ROWS": block_rows,
    }
    lists = (rows.token_rows, rows.first_rows, table.addresses)
    weight = table.experts[0]
    if isinstance(weight, PackedWeight):
        launch = launch_quantized if weight.row_format else launch_packed
        launch(x, weight, bias, y, num_tiles, lists, sizes)
        return
    _grouped_kernel[(triton.cdiv(weight.num_outputs, BLOCK_OUTPUTS) * num_tiles,)](
        x,
        *lists,
        y if bias is None else bias,
        y,
        weight.num_outputs,
        weight.num_inputs,
        HAS_BIAS=bias is not None,
        BLOCK_OUTPUTS=BLOCK_OUTPUTS,
        BLOCK_INPUTS=BLOCK_INPUTS,
        IS_WIDENED=x.device.type != "cuda",
        **sizes,
    )


def _combine(y: Tensor, routes: Tensor, rows: ExpertRows, sums: Tensor) -> None:
    num_tokens, num_columns = sums.shape
    if num_tokens:
        _combine_kernel[(num_tokens, triton.cdiv(num_columns, _BLOCK_COLUMNS))](
            y,
            routes,
            rows.places,
            sums,
            num_columns,
            TOP_K=rows.places.shape[1],
            BLOCK=_BLOCK_COLUMNS,
        )


@triton.jit(do_not_specialize=["num_choices"])
def _group_kernel(
    routes_ptr,
    token_rows_ptr,
    places_ptr,
    first_rows_ptr,
    num_choices,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """An expert's rows lie behind those of lower ones; the one after the last has none."""
    expert = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    first = tl.zeros([1], tl.int32)
    for start in range(0, num_choices, BLOCK):
        choice = start + at
        place = choice // TOP_K * (2 * TOP_K) + choice % TOP_K
        ids = tl.load(routes_ptr + place, mask=choice < num_choices, other=expert)
        first += tl.sum((ids.to(tl.int32) < expert).to(tl.int32), 0)
    tl.store(first_rows_ptr + expert + tl.arange(0, 1), first)
    for start in range(0, num_choices, BLOCK):
        choice = start + at
        place = choice // TOP_K * (2 * TOP_K) + choice % TOP_K
        ids = tl.load(routes_ptr + place, mask=choice < num_choices, other=-1.0)
        is_own = ids.to(tl.int32) == expert
        row = first + tl.cumsum(is_own.to(tl.int32), 0) - 1
        tl.store(token_rows_ptr + row, choice // TOP_K, mask=is_own)
        tl.store(places_ptr + choice, row, mask=is_own)
        first += tl.sum(is_own.to(tl.int32), 0)


@triton.jit
def _grouped_kernel(
    x_ptr,
    token_rows_ptr,
    first_rows_ptr,
    addresses_ptr,
    bias_ptr,
    y_ptr,
    num_outputs,
    num_inputs,
    HAS_BIAS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    IS_BY_TOKEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    IS_WIDENED: tl.constexpr,
):
    block, tile = own_place(num_outputs, BLOCK_OUTPUTS)
    expert, rows, source, is_row = product_rows(
        token_rows_ptr, first_rows_ptr, 0, tile,
        NUM_EXPERTS, BLOCK_EXPERTS, IS_BY_TOKEN, BLOCK_ROWS,
    )  # fmt: skip
    weight_ptr = tl.load(addresses_ptr + expert).to(tl.pointer_type(x_ptr.dtype.element_ty))
    weight_ptr = tl.multiple_of(weight_ptr, 16)
    outputs = block * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    inner = tl.arange(0, BLOCK_INPUTS)
    is_output = outputs < num_outputs
    x_at = x_ptr + source.to(tl.int64)[:, None] * num_inputs + inner[None, :]
    weight_at = weight_ptr + outputs.to(tl.int64)[None, :] * num_inputs + inner[:, None]
    sums = tl.zeros([BLOCK_ROWS, BLOCK_OUTPUTS], tl.float32)
    num_read = tl.where(tl.sum(is_row.to(tl.int32), 0) > 0, num_inputs, 0)
    for first in range(0, num_read, BLOCK_INPUTS):
        is_input = first + inner < num_inputs
        x = tl.load(x_at + first, mask=is_row[:, None] & is_input[None, :], other=0.0)
        weight = tl.load(weight_at + first, mask=is_output[None, :] & is_input[:, None], other=0.0)
        if IS_WIDENED:  # the interpreter's products of 16 bits don't sum in fp32
            x = x.to(tl.float32)
            weight = weight.to(tl.float32)
        sums = tl.dot(x, weight, sums, input_precision="ieee")
    if HAS_BIAS:
        at = bias_ptr + expert * num_outputs + outputs
        sums += tl.load(at, mask=is_output, other=0.0)[None, :]
    y_at = y_ptr + rows.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    tl.store(y_at, sums, mask=is_row[:, None] & is_output[None, :])


@triton.jit
def _combine_kernel(
    y_ptr,
    routes_ptr,
    places_ptr,
    sums_ptr,
    num_columns,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A token's experts, in ascending order."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < num_columns
    target = sums_ptr + token * num_columns + columns
    total = tl.load(target, mask=is_column, other=0.0)
    for choice in range(TOP_K):
        row = tl.load(places_ptr + token * TOP_K + choice).to(tl.int64)
        weight = tl.load(routes_ptr + (2 * token + 1) * TOP_K + choice)
        total += weight * tl.load(y_ptr + row * num_columns + columns, mask=is_column, other=0.0)
    tl.store(target, total, mask=is_column)
