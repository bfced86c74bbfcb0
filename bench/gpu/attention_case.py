"""A step's attention, as the kernels are measured with it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lmi_core.ops.device.device_step import DeviceStep
from lmi_core.ops.device.paged_cache import KV_DTYPES, CacheScales, PagedCache, Scales
from lmi_core.ops.device.step_arrays import StepArrays

BLOCK_SIZE = 32


class Attention(NamedTuple):
    """Sequences of ``num_keys`` tokens, of which the last ``num_rows`` are in the step."""

    num_seqs: int
    num_keys: int
    num_rows: int
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    kv_dtype: str = "bf16"

    @property
    def name(self) -> str:
        kind = "decode" if self.num_rows == 1 else "prefill"
        heads = f"{self.num_q_heads}/{self.num_kv_heads}x{self.head_dim}"
        cache = "" if self.kv_dtype == "bf16" else f" {self.kv_dtype}"
        return f"{kind} {self.num_seqs}x{self.num_keys} heads {heads}{cache}"

    @property
    def is_latent(self) -> bool:
        """Whether keys are the values, too."""
        return self.num_kv_heads == 1 and self.head_dim > 256

    @property
    def num_bytes(self) -> int:
        head_bytes = self.head_dim * KV_DTYPES[self.kv_dtype].itemsize
        head_bytes += 4 if self.kv_dtype == "int8" else 0  # the scale
        num_heads = self.num_kv_heads * (1 if self.is_latent else 2)
        return self.num_seqs * self.num_keys * num_heads * head_bytes

    @property
    def num_operations(self) -> int:
        pairs = self.num_rows * self.num_keys - self.num_rows * (self.num_rows - 1) // 2
        return 4 * self.num_seqs * pairs * self.num_q_heads * self.head_dim


class Inputs(NamedTuple):
    q: Tensor
    keys: Tensor
    values: Tensor
    step: DeviceStep
    scales: Scales


def make_inputs(case: Attention, device: str) -> Inputs:
    """Random queries, and a cache in a random order of blocks."""
    arrays = _arrays(case)
    cache = PagedCache(
        num_layers=1,
        num_blocks=arrays.block_tables.size,
        block_size=BLOCK_SIZE,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        dtype=case.kv_dtype,
        device=torch.device(device),
        is_latent=case.is_latent,
    )

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    keys, values, scales = cache.layers[0]
    for store in (keys, values):
        drawn = random(*store.shape)
        store.copy_(drawn.mul_(40).clamp_(-127, 127) if case.kv_dtype == "int8" else drawn)
    if isinstance(scales, CacheScales):
        for rows_scales in scales:
            rows_scales.fill_(1 / 40)
    return Inputs(
        random(arrays.slots.size, case.num_q_heads * case.head_dim),
        keys,
        values,
        DeviceStep.upload(arrays, block_size=BLOCK_SIZE, device=torch.device(device)),
        scales,
    )


def _arrays(case: Attention) -> StepArrays:
    num_columns = -(-case.num_keys // BLOCK_SIZE)
    tables = np.random.default_rng(0).permutation(case.num_seqs * num_columns)
    tables = tables.reshape(case.num_seqs, num_columns).astype(np.int32)
    positions = np.arange(case.num_keys - case.num_rows, case.num_keys)
    slots = tables[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    rows = np.arange(case.num_seqs, dtype=np.int32)
    empty = rows[:0]
    return StepArrays(
        token_ids=np.zeros(slots.size, np.int32),
        positions=np.tile(positions, case.num_seqs).astype(np.int32),
        slots=slots.ravel().astype(np.int32),
        first_rows=rows * case.num_rows,
        num_rows=np.full(case.num_seqs, case.num_rows, np.int32),
        kv_lengths=np.full(case.num_seqs, case.num_keys, np.int32),
        table_rows=rows,
        block_tables=tables,
        logit_token_rows=empty,
        sampling_rows=empty,
        target_ids=empty,
        copy_src=empty,
        copy_dst=empty,
    )
