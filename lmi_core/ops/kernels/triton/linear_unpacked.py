"""Products of many rows with int4 weights, which are unpacked and multiplied as dense ones."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmi_core.ops.device.packed_weight import HEADER_BYTES, STEP_BYTES, PackedWeight
from lmi_core.ops.kernels.torch_ops.linear import linear

STEP_INPUTS = 8
BLOCK_OUTPUTS = 16
BLOCK_STEPS = 32
SLICE_OUTPUTS = 64
"""Slices of a weight are multiples of this."""


def linear_unpacked(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, unpacked: Tensor
) -> Tensor:
    """x @ weight^T + bias with an int4 weight, rounded to the dtype of x, 16 bits: [R, k] -> fp32
    [R, n]; bias is fp32. k: a multiple of 8. ``unpacked``: ``weight.unpacked_bytes``, written."""
    num_outputs, num_inputs = weight.num_outputs, weight.num_inputs
    room = unpacked.view(x.dtype)
    num_fitting = weight.unpacked_bytes // (2 * num_inputs)
    if num_fitting >= num_outputs:
        return linear(x, _unpack(weight, room, 0, num_outputs), bias)
    num_slices = triton.cdiv(num_outputs, num_fitting // SLICE_OUTPUTS * SLICE_OUTPUTS)
    num_in_slice = triton.cdiv(num_outputs, num_slices * SLICE_OUTPUTS) * SLICE_OUTPUTS
    y = torch.empty(len(x), num_outputs, dtype=torch.float32, device=x.device)
    for first in range(0, num_outputs, num_in_slice):
        part = slice(first, min(first + num_in_slice, num_outputs))
        dense = _unpack(weight, room, part.start, part.stop)
        y[:, part] = linear(x, dense, None if bias is None else bias[part])
    return y


def _unpack(weight: PackedWeight, room: Tensor, first: int, end: int) -> Tensor:
    """Outputs ``first`` .. ``end`` [end - first, k]."""
    num_inputs = weight.num_inputs
    dense = room[: (end - first) * num_inputs].view(end - first, num_inputs)
    num_steps = num_inputs // STEP_INPUTS
    grid = (triton.cdiv(end - first, BLOCK_OUTPUTS), triton.cdiv(num_steps, BLOCK_STEPS))
    _unpack_kernel[grid](
        weight.panels.view(torch.int32),
        weight.panels.view(torch.float16),
        dense,
        first,
        end,
        weight.num_outputs,
        num_steps,
        weight.num_bytes // weight.num_panels,
        IS_GATED=weight.is_gated,
        GROUP_STEPS=weight.group_size // STEP_INPUTS,
        HEADER=HEADER_BYTES,
        STEP=STEP_BYTES,
        BLOCK_OUTPUTS=BLOCK_OUTPUTS,
        BLOCK_STEPS=BLOCK_STEPS,
    )
    return dense


@triton.jit
def _unpack_kernel(
    words_ptr,
    halves_ptr,
    y_ptr,
    first_output,
    end_output,
    num_outputs,
    num_steps,
    panel_bytes,
    IS_GATED: tl.constexpr,
    GROUP_STEPS: tl.constexpr,
    HEADER: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_STEPS: tl.constexpr,
):
    output = first_output + tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    step = tl.program_id(1) * BLOCK_STEPS + tl.arange(0, BLOCK_STEPS)
    if IS_GATED:
        is_up = (output >= num_outputs // 2).to(tl.int32)
        in_part = output - is_up * (num_outputs // 2)
        panel = in_part // 16 * 2 + is_up
    else:
        in_part = output
        panel = output // 16
    lane = in_part % 16
    base = panel.to(tl.int64) * panel_bytes
    group_at = step // GROUP_STEPS * (HEADER + GROUP_STEPS * STEP)
    is_there = (output < end_output)[:, None] & (step < num_steps)[None, :]

    # A word has eight inputs of an output: lower halves of its bytes, then upper ones.
    word_at = group_at + HEADER + step % GROUP_STEPS * STEP
    words_at = words_ptr + (base // 4 + lane)[:, None] + (word_at // 4)[None, :]
    words = tl.load(words_at, mask=is_there, other=0)
    header_at = halves_ptr + (base // 2 + lane)[:, None] + (group_at // 2)[None, :]
    scales = tl.load(header_at, mask=is_there, other=0.0).to(tl.float32)
    zeros = tl.load(header_at + 16, mask=is_there, other=0.0).to(tl.float32)
    inner = tl.arange(0, 8)
    codes = (words[:, :, None] >> (inner % 4 * 8 + inner // 4 * 4)[None, None, :]) & 15
    weights = (codes.to(tl.float32) - zeros[:, :, None]) * scales[:, :, None]

    y_at = y_ptr + (output - first_output).to(tl.int64)[:, None, None] * (num_steps * 8)
    y_at += (step * 8)[None, :, None] + inner[None, None, :]
    tl.store(y_at, weights.to(y_ptr.dtype.element_ty), mask=is_there[:, :, None])
