"""The KV cache as tensors on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from lmi_core.ops.device.torch_weights import DTYPES

FLOAT8_DTYPES = {"fp8_e4m3fn": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
KV_DTYPES = {**DTYPES, "int8": torch.int8, **FLOAT8_DTYPES}
CODE_DTYPES = (torch.int8, *FLOAT8_DTYPES.values())
INT8_STEPS = 127
"""The scale of a row is this part of its largest magnitude."""


class CacheScales(NamedTuple):
    """What one layer's int8 codes are multiples of, fp32 [slots, kv heads]."""

    keys: Tensor
    values: Tensor


class FixedScales(NamedTuple):
    """What all of one layer's fp8 codes are multiples of."""

    keys: float = 1.0
    values: float = 1.0


Scales = CacheScales | FixedScales | None


def fixed_of(scales: Scales) -> FixedScales:
    """The scales of all codes; 1 where there are none, or one per row."""
    return scales if isinstance(scales, FixedScales) else FixedScales()


class PagedCache:
    """Keys and values, each [layers, slots, kv heads, head_dim]; int8: with a scale per token and
    head; fp8: with one for all, ``fixed_scales`` of each layer. ``is_latent``: keys alone, which
    are the values, too."""

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
        fixed_scales: Sequence[FixedScales] = (),
        is_latent: bool = False,
    ) -> None:
        self.block_size, self.head_dim = block_size, head_dim
        self._num_layers, self._num_kv_heads = num_layers, num_kv_heads
        self._dtype, self._device = dtype, device
        self._fixed_scales = fixed_scales or (FixedScales(),) * num_layers
        self.is_latent = is_latent
        self._stores: tuple[Tensor, ...] = ()
        self.layers: list[tuple[Tensor, Tensor, Scales]] = []
        """Of each: keys, values [slots, kv heads, head_dim] and the scales of 8-bit ones."""
        self.resize(num_blocks)

    def resize(self, num_blocks: int) -> None:
        """Room for so many blocks, of new content."""
        self._stores = ()
        self.layers = []
        shape = (self._num_layers, num_blocks * self.block_size, self._num_kv_heads)
        dtype = KV_DTYPES[self._dtype]
        num_parts = 1 if self.is_latent else 2
        stores = [
            torch.empty(*shape, self.head_dim, dtype=dtype, device=self._device)
            for _ in range(num_parts)
        ]
        if self._dtype == "int8":
            stores += [torch.empty(shape, device=self._device) for _ in range(num_parts)]
        self._stores = tuple(stores)
        if self.is_latent:
            stores = [store for store in stores for _ in range(2)]
        for layer in range(self._num_layers):
            keys, values, *rows = (store[layer] for store in stores)
            scales: Scales = CacheScales(*rows) if rows else None
            if self._dtype in FLOAT8_DTYPES:
                scales = self._fixed_scales[layer]
                if self.is_latent:
                    scales = FixedScales(scales.keys, scales.keys)
            self.layers.append((keys, values, scales))

    @property
    def stores(self) -> tuple[Tensor, ...]:
        """Each [layers, slots, kv heads, ...]."""
        return self._stores

    @property
    def num_bytes(self) -> int:
        return sum(store.numel() * store.element_size() for store in self._stores)

    def copy_blocks(self, src: Tensor, dst: Tensor) -> None:
        """Copy whole blocks in every layer; none is both read and written."""
        for store in self._stores:
            blocks = store.view(len(store), -1, self.block_size, *store.shape[2:])
            blocks[:, dst] = blocks[:, src]


def layer_arguments(cache: PagedCache, layer: int) -> dict[str, object]:
    """A layer's keys and values as arguments of kernels; functions: asked for where they lie when
    a step list is built."""
    keys, _, scales = cache.layers[layer]
    arguments: dict[str, object] = {
        "keys": lambda: cache.layers[layer][0],
        "values": lambda: cache.layers[layer][1],
        "num_kv_heads": keys.shape[1],
        "head_dim": cache.head_dim,
        "kv_dtype": keys.dtype,
        "value_scale": fixed_of(scales).values,
    }
    if isinstance(scales, CacheScales):
        arguments["key_scales"] = lambda: cast(CacheScales, cache.layers[layer][2]).keys
        arguments["value_scales"] = lambda: cast(CacheScales, cache.layers[layer][2]).values
    return arguments
