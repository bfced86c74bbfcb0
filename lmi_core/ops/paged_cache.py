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
        self.block_size, self.head_dim = block_size, head_dim
        self._num_layers, self._num_kv_heads = num_layers, num_kv_heads
        self._dtype, self._device = dtype, device
        self._stores: tuple[Tensor, ...] = ()
        self.layers: list[tuple[Tensor, Tensor, CacheScales | None]] = []
        """Of each: keys, values [slots, kv heads, head_dim] and the scales of int8 ones."""
        self.resize(num_blocks)

    def resize(self, num_blocks: int) -> None:
        """Room for so many blocks, of new content."""
        self._stores = ()
        self.layers = []
        shape = (self._num_layers, num_blocks * self.block_size, self._num_kv_heads)
        dtype = KV_DTYPES[self._dtype]
        stores = [
            torch.empty(*shape, self.head_dim, dtype=dtype, device=self._device) for _ in range(2)
        ]
        if self._dtype == "int8":
            stores += [torch.empty(shape, device=self._device) for _ in range(2)]
        self._stores = tuple(stores)
        for layer in range(self._num_layers):
            keys, values, *scales = (store[layer] for store in stores)
            self.layers.append((keys, values, CacheScales(*scales) if scales else None))

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
        return sum(store.numel() * store.element_size() for store in self._stores)

    def copy_blocks(self, src: Tensor, dst: Tensor) -> None:
        """Copy whole blocks in every layer; none is both read and written."""
        for store in self._stores:
            blocks = store.view(len(store), -1, self.block_size, *store.shape[2:])
            blocks[:, dst] = blocks[:, src]
