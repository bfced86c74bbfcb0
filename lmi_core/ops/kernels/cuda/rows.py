"""Rows of tables by id, and whole KV blocks copied."""

from __future__ import annotations

import torch
from torch import Tensor

from lmi_core.ops.kernels.cuda import library


def gather_rows(
    table: Tensor,
    ids: Tensor,
    scale: float = 1.0,
    *,
    offset: int = 0,
    added_to: Tensor | None = None,
) -> Tensor:
    """scale * table[ids + offset]: [any, n], int32 [R] -> fp32 [R, n], of its own or added to."""
    y = added_to
    if y is None:
        y = table.new_empty(len(ids), table.shape[1], dtype=torch.float32)
    library.call(
        "gather_rows",
        table,
        table=table,
        ids=ids,
        y=y,
        num_rows=len(ids),
        num_columns=table.shape[1],
        scale=scale,
        table_dtype=table.dtype,
        offset=offset,
        adds=added_to is not None,
    )
    return y


def copy_blocks(store: Tensor, src: Tensor, dst: Tensor, *, block_size: int) -> None:
    """Copy blocks of ``store`` [layers, slots, hkv, d] in every layer; src, dst: int32. None is
    both read and written."""
    layer_bytes = store[0].numel() * store.element_size()
    library.call(
        "copy_blocks",
        store,
        store=store,
        src=src,
        dst=dst,
        layer_bytes=layer_bytes,
        block_bytes=layer_bytes // store.shape[1] * block_size,
        num_layers=len(store),
        num_copies=len(src),
    )
