"""Who attends to what in a step: worked out on the host, uploaded once, used by every layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lmi_core.ops.cuda import library
from lmi_core.ops.cuda.arguments import AttentionPlan
from lmi_core.ops.device_step import DeviceStep
from lmi_core.ops.step_arrays import IntArray

BLOCKS_PER_PROCESSOR = 2
"""Decode blocks that a multiprocessor runs at once."""
EMULATED_SLOTS = 8
SPLIT_TOKENS = 0
"""Keys per split of a decode; 0: as many as keep the device busy. A fixed size, a multiple of 64,
makes a sequence's result independent of the other ones' lengths."""
_MIN_SPLIT_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Lists of csrc/cuda/lmi_cuda.h, int32 on the device."""

    decode: Tensor
    """[n, 4]: sequence, first key, key past the last, partial result or -1."""
    prefill: Tensor
    """[n, 4]: sequence, first row, row past the last, -1."""
    merges: Tensor
    """[n, 3]: sequence, first partial result, number of them."""
    num_partials: int


def plan_attention(
    step: DeviceStep, *, num_q_heads: int, num_kv_heads: int, head_dim: int, window: int
) -> Plan:
    """The step's plan for layers of this shape, the same object for each of them."""
    key = ("attention", num_q_heads, num_kv_heads, head_dim, window)
    plan = step.plans.get(key)
    if plan is None:
        plan = _make(step, num_q_heads, num_kv_heads, head_dim, window)
        step.plans[key] = plan
    assert isinstance(plan, Plan)
    return plan


def _make(
    step: DeviceStep, num_q_heads: int, num_kv_heads: int, head_dim: int, window: int
) -> Plan:
    host, device = step.host, step.positions.device
    num_rows = np.ascontiguousarray(host.num_rows, np.int32)
    kv_lengths = np.ascontiguousarray(host.kv_lengths, np.int32)
    smallest = SPLIT_TOKENS or _MIN_SPLIT_TOKENS
    capacity = int(max((kv_lengths // smallest + 2).sum(), num_rows.sum()))
    decode, prefill = np.empty((2, capacity, 4), np.int32)
    merges = np.empty((len(num_rows), 3), np.int32)
    request = AttentionPlan(
        num_rows=num_rows.ctypes.data,
        kv_lengths=kv_lengths.ctypes.data,
        num_seqs=len(num_rows),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        window=window,
        num_slots=_num_slots(device),
        split_tokens=SPLIT_TOKENS,
        capacity=capacity,
        decode=decode.ctypes.data,
        prefill=prefill.ctypes.data,
        merges=merges.ctypes.data,
    )
    library.load().call_with("plan_attention", request)
    return Plan(
        decode=_upload(decode[: request.num_decode], device),
        prefill=_upload(prefill[: request.num_prefill], device),
        merges=_upload(merges[: request.num_merges], device),
        num_partials=request.num_partials,
    )


def _num_slots(device: torch.device) -> int:
    if device.type != "cuda":
        return EMULATED_SLOTS
    processors: int = torch.cuda.get_device_properties(device).multi_processor_count
    return BLOCKS_PER_PROCESSOR * processors


def _upload(rows: IntArray, device: torch.device) -> Tensor:
    return torch.from_numpy(rows).to(device)
