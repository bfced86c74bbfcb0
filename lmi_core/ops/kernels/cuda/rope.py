"""Rotary position embedding and the write to the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from lmi_core.ops.device.paged_cache import CacheScales, Scales, fixed_of
from lmi_core.ops.kernels.cuda import library


def rope_cache_write(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor | None,
    positions: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    num_q_heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    norm_eps: float,
    out_dtype: torch.dtype,
    scales: Scales = None,
) -> Tensor:
    """As ``torch_ops`` has it."""
    by_row = scales if isinstance(scales, CacheScales) else None
    fixed = fixed_of(scales)
    num_tokens, (num_kv_heads, head_dim) = len(qkv), keys.shape[1:]
    q = qkv.new_empty(num_tokens, num_q_heads * head_dim, dtype=out_dtype)
    library.call(
        "rope_cache_write",
        qkv,
        qkv=qkv,
        qkv_dtype=qkv.dtype,
        q=q,
        keys=keys,
        values=values,
        positions=positions,
        slots=slots,
        cos=cos,
        sin=sin,
        q_norm=q_norm,
        k_norm=k_norm,
        num_tokens=num_tokens,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        half_rotary=cos.shape[1],
        norm_eps=norm_eps,
        q_dtype=out_dtype,
        kv_dtype=keys.dtype,
        key_scales=None if by_row is None else by_row.keys,
        value_scales=None if by_row is None else by_row.values,
        key_scale=fixed.keys,
        value_scale=fixed.values,
    )
    return q
