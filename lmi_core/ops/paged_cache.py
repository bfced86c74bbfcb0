"""The KV cache as tensors on a device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lmi_core.ops.torch_weights import DTYPES

KV_DTYPES = {**DTYPES, "int8": torch.int8}
INT8_STEPS = 127
"""The scale of a row is this part of its largest magnitude."""


class CacheScales(NamedTuple):
    """What one layer's int8 codes are multiples of, fp32 [slots, kv heads]."""

    keys: Tensor
    values: Tensor


class PagedCache:
    """Keys and values, each [layers, slots, kv heads, head_dim]; int8: with a scale per token and
    head."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: str,
        device: torch.device,
    ) -> None:
        shape = (num_layers, num_blocks * block_size, num_kv_heads, head_dim)
        self.block_size = block_size
        self.keys = torch.empty(shape, dtype=KV_DTYPES[dtype], device=device)
        self.values = torch.empty_like(self.keys)
        self._scales: tuple[Tensor, ...] = ()
        if dtype == "int8":
            self._scales = tuple(torch.empty(shape[:3], device=device) for _ in range(2))

    @staticmethod
    def block_bytes(
        *, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: str
    ) -> int:
        """Bytes of a block in all layers."""
        head_bytes = head_dim * KV_DTYPES[dtype].itemsize
        if dtype == "int8":
            head_bytes += torch.float32.itemsize
        return 2 * num_layers * block_size * num_kv_heads * head_bytes

    @property
    def num_bytes(self) -> int:
        return sum(store.numel() * store.element_size() for store in self._stores())

    def scales(self, layer: int) -> CacheScales | None:
        """The scales of an int8 cache."""
        if not self._scales:
            return None
        keys, values = self._scales
        return CacheScales(keys[layer], values[layer])

    def copy_blocks(self, src: Tensor, dst: Tensor) -> None:
        """Copy whole blocks in every layer; none is both read and written."""
        for store in self._stores():
            blocks = store.view(len(store), -1, self.block_size, *store.shape[2:])
            blocks[:, dst] = blocks[:, src]

    def _stores(self) -> tuple[Tensor, ...]:
        return self.keys, self.values, *self._scales
