"""Matrix products over int4 weights, activations in their own dtype."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmi_core.ops.device import packed_weight
from lmi_core.ops.device.packed_weight import HEADER_BYTES, PackedWeight
from lmi_core.ops.kernels.triton.expert_tile import own_place, product_rows, store_panels
from lmi_core.ops.kernels.triton.linear_unpacked import STEP_INPUTS, linear_unpacked

BLOCK_PANELS = 2


def linear_packed(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    *,
    unpacked: Tensor | None = None,
    block_rows: int = 0,
) -> Tensor:
    """As ``torch_ops`` has it; rows of 16 bits make use of ``unpacked``. ``block_rows``: that a
    program takes; 0: by the number of rows."""
    num_rows, num_inputs = x.shape
    is_many = num_rows > packed_weight.MAX_PACKED_ROWS and num_inputs % STEP_INPUTS == 0
    if unpacked is not None and is_many and x.dtype.itemsize == 2:
        return linear_unpacked(x, weight, bias, unpacked)
    y = torch.empty(num_rows, weight.num_outputs, dtype=torch.float32, device=x.device)
    if num_rows == 0:
        return y
    block_rows = block_rows or (16 if num_rows <= 16 else 64)
    num_tiles = triton.cdiv(num_rows, block_rows)
    sizes = {"NUM_EXPERTS": 0, "BLOCK_EXPERTS": 1, "IS_BY_TOKEN": False, "BLOCK_ROWS": block_rows}
    launch_packed(x, weight, bias, y, num_tiles, (y, y, y), sizes)
    return y


def launch_packed(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    y: Tensor,
    num_tiles: int,
    lists: tuple[Tensor, Tensor, Tensor],
    sizes: dict[str, int],
) -> None:
    """``lists``: of experts that are all as ``weight`` is, their rows' tokens, their first rows and
    the addresses of their panels; ``sizes``: as ``product_rows`` calls them."""
    _linear_packed_kernel[(triton.cdiv(weight.num_panels, BLOCK_PANELS) * num_tiles,)](
        x,
        weight.panels,
        weight.panels.view(torch.float16),
        y if bias is None else bias,
        y,
        *lists,
        len(y),
        weight.num_inputs,
        weight.num_outputs,
        weight.num_panels,
        weight.num_bytes // weight.num_panels,
        HAS_BIAS=bias is not None,
        IS_GATED=weight.is_gated,
        GROUP=weight.group_size,
        HEADER=HEADER_BYTES,
        GROUP_BYTES=HEADER_BYTES + weight.group_size * 8,
        BLOCK_PANELS=BLOCK_PANELS,
        IS_WIDENED=x.device.type != "cuda",
        **sizes,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _linear_packed_kernel(
    x_ptr,
    codes_ptr,
    halves_ptr,
    bias_ptr,
    y_ptr,
    token_rows_ptr,
    first_rows_ptr,
    addresses_ptr,
    num_rows,
    num_inputs,
    num_outputs,
    num_panels,
    panel_bytes,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    GROUP: tl.constexpr,
    HEADER: tl.constexpr,
    GROUP_BYTES: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    IS_BY_TOKEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_PANELS: tl.constexpr,
    IS_WIDENED: tl.constexpr,
):
    columns = tl.arange(0, BLOCK_PANELS * 16)
    block, tile = own_place(num_panels, BLOCK_PANELS)
    panel = block * BLOCK_PANELS + columns // 16
    lane = columns % 16
    # A panel past the last reads the last one; its outputs are not stored.
    base = tl.minimum(panel, num_panels - 1).to(tl.int64) * panel_bytes
    expert, rows, source, is_there = product_rows(
        token_rows_ptr, first_rows_ptr, num_rows, tile,
        NUM_EXPERTS, BLOCK_EXPERTS, IS_BY_TOKEN, BLOCK_ROWS,
    )  # fmt: skip
    is_row = is_there[:, None]
    num_read = num_inputs
    if NUM_EXPERTS > 0:
        address = tl.load(addresses_ptr + expert)
        codes_ptr = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), 16)
        halves_ptr = tl.multiple_of(address.to(tl.pointer_type(tl.float16)), 16)
        num_read = tl.where(tl.sum(is_there.to(tl.int32), 0) > 0, num_inputs, 0)
    inner = tl.arange(0, GROUP)
    x_at = x_ptr + source.to(tl.int64)[:, None] * num_inputs + inner[None, :]

    sums = tl.zeros([BLOCK_ROWS, BLOCK_PANELS * 16], tl.float32)
    byte = HEADER + inner // 8 * 64 + inner % 4
    shift = (inner % 8 // 4 * 4)[:, None]
    codes_at = codes_ptr + byte[:, None] + (base + lane * 4)[None, :]
    for first in range(0, num_read, GROUP):
        is_input = first + inner < num_inputs
        x = tl.load(x_at + first, mask=is_row & is_input[None, :], other=0.0)
        group_at = first // GROUP * GROUP_BYTES
        codes = tl.load(codes_at + group_at, mask=is_input[:, None], other=0).to(tl.int32)
        header_at = (base + group_at) // 2 + lane
        zeros = tl.load(halves_ptr + header_at + 16).to(tl.float32)
        weights = ((codes >> shift) & 15).to(tl.float32) - zeros[None, :]
        if IS_WIDENED:  # the interpreter's products of 16 bits don't sum in fp32
            product = tl.dot(x.to(tl.float32), weights)
        else:
            product = tl.dot(x, weights.to(x.dtype), input_precision="ieee")
        sums += product * tl.load(halves_ptr + header_at).to(tl.float32)[None, :]

    store_panels(
        sums, y_ptr, bias_ptr, expert, rows, is_row, panel, lane, num_panels, num_outputs,
        HAS_BIAS, IS_GATED,
    )  # fmt: skip
