"""Who attends to what in a step: worked out on the host, uploaded once, used by every layer."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lmi_core.ops.device.device_step import DeviceStep
from lmi_core.ops.device.step_arrays import IntArray, StepArrays
from lmi_core.ops.kernels.cuda import library

BLOCKS_PER_PROCESSOR = 2
"""Decode blocks that a multiprocessor runs at once."""
EMULATED_SLOTS = 8
SPLIT_TOKENS = 0
"""Keys per split of a decode; 0: as many as keep the device busy. A fixed size, a multiple of 64,
makes a sequence's result independent of the other ones' lengths."""
MAX_HEAD_DIM, LATENT_ROWS = 256, 64
"""kMaxHeadDim and kLatentRows of csrc/cuda/attention_lists.h."""
_MIN_SPLIT_TOKENS = 256
_ENTRY_SIZE = 6
"""Of LmiAttentionWork."""


class AttentionLists:
    """Lists of csrc/cuda/lmi_cuda.h, int32 on the device, for layers of one shape."""

    def __init__(
        self,
        step: DeviceStep,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        window: int,
        prefills_all: bool,
    ) -> None:
        self._shape = {
            "num_q_heads": num_q_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "window": window,
            "num_slots": num_slots(step.positions.device),
            "split_tokens": SPLIT_TOKENS,
            "prefills_all": prefills_all,
        }
        lists = _lists(step.host, self._shape)
        if step.is_refilled and not prefills_all:
            lists = lists.padded(_most_work(step.host, self._shape))
        device = step.positions.device
        self._values = _upload(lists, device)
        parts = torch.split(self._values, [lists.decode.size, lists.prefill.size])
        self.decode = parts[0].view(-1, _ENTRY_SIZE)
        self.prefill = parts[1].view(-1, _ENTRY_SIZE)
        self.num_partials = lists.num_partials
        self.arrivals = torch.zeros(
            lists.num_partials, num_q_heads, dtype=torch.int32, device=device
        )
        """Zeros, but while a kernel counts in them."""

    def refresh(self, host: StepArrays) -> None:
        """Lists of another step of single rows, into the same places."""
        lists = _lists(host, self._shape).padded(len(self.decode))
        self._values.copy_(_staged(lists, self._values.device), non_blocking=True)


class _Lists(NamedTuple):
    decode: IntArray
    prefill: IntArray
    num_partials: int

    def padded(self, num_decode: int) -> _Lists:
        """With entries that are no work, up to this number of them."""
        decode = np.zeros((num_decode, _ENTRY_SIZE), np.int32)
        decode[: len(self.decode)] = self.decode
        return _Lists(decode, self.prefill, num_decode)


def list_attention(
    step: DeviceStep,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window: int,
    prefills_all: bool,
) -> AttentionLists:
    """The step's lists for layers of this shape, the same object for each of them.
    ``prefills_all``: also sequences of one row."""
    key = ("attention", num_q_heads, num_kv_heads, head_dim, window)
    lists = step.derived.get(key)
    if lists is None:
        lists = AttentionLists(
            step,
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            window=window,
            prefills_all=prefills_all,
        )
        step.derived[key] = lists
    assert isinstance(lists, AttentionLists)
    return lists


def _lists(host: StepArrays, shape: dict[str, int]) -> _Lists:
    num_rows = np.ascontiguousarray(host.num_rows, np.int32)
    kv_lengths = np.ascontiguousarray(host.kv_lengths, np.int32)
    smallest = shape["split_tokens"] or _MIN_SPLIT_TOKENS
    capacity = int(max((kv_lengths // smallest + 2).sum(), num_rows.sum()))
    decode, prefill = np.empty((2, capacity, _ENTRY_SIZE), np.int32)
    kernels = library.load()
    request = kernels.interface.structs["AttentionLists"](
        num_rows=num_rows.ctypes.data,
        kv_lengths=kv_lengths.ctypes.data,
        num_seqs=len(num_rows),
        capacity=capacity,
        decode=decode.ctypes.data,
        prefill=prefill.ctypes.data,
        **shape,
    )
    kernels.call_with("list_attention", request)
    return _Lists(
        decode[: request.num_decode],
        prefill[: request.num_prefill],
        request.num_partials,
    )


def _most_work(host: StepArrays, shape: dict[str, int]) -> int:
    """Entries of the longest decode list of any step of up to these lengths: a sequence has a split
    for each that its keys fill, and one begun at either end (csrc/cuda/attention_lists.h)."""
    num_seqs = len(host.kv_lengths)
    if shape["split_tokens"]:
        return int((host.kv_lengths // shape["split_tokens"] + 2).sum())
    return max(shape["num_slots"] // _slots_of_piece(shape), 1) + 2 * num_seqs


def _slots_of_piece(shape: dict[str, int]) -> int:
    """As csrc/cuda/attention_lists.h has it."""
    if shape["head_dim"] <= MAX_HEAD_DIM:
        return shape["num_kv_heads"]
    return 2 * -(-shape["num_q_heads"] // LATENT_ROWS)


def num_slots(device: torch.device) -> int:
    """Decode blocks that the device runs at once."""
    if device.type != "cuda":
        return EMULATED_SLOTS
    processors: int = torch.cuda.get_device_properties(device).multi_processor_count
    return BLOCKS_PER_PROCESSOR * processors


def _upload(lists: _Lists, device: torch.device) -> Tensor:
    return _staged(lists, device).to(device, non_blocking=True)


def _staged(lists: _Lists, device: torch.device) -> Tensor:
    """All lists behind one another, on the host."""
    values = np.concatenate([part.ravel() for part in lists[:2]])
    staging = torch.empty(values.size, dtype=torch.int32, pin_memory=device.type == "cuda")
    staging.numpy()[:] = values
    return staging
