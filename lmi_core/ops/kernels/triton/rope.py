"""Rotary position embedding and the write to the paged cache, one program per token and head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmi_core.ops.device.paged_cache import Scales
from lmi_core.ops.kernels.triton.codes import StoredCache, store_head


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
    num_tokens, (num_kv_heads, head_dim) = len(qkv), keys.shape[1:]
    q = qkv.new_empty(num_tokens, num_q_heads * head_dim, dtype=out_dtype)
    cache = StoredCache.of(keys, keys if values is None else values, scales)
    num_heads = num_q_heads + (1 if values is None else 2) * num_kv_heads
    if num_tokens:
        _rope_cache_write_kernel[(num_tokens, num_heads)](
            qkv,
            q,
            *cache.tensors,
            positions,
            slots,
            cos,
            sin,
            cos if q_norm is None else q_norm,
            cos if k_norm is None else k_norm,
            norm_eps,
            *cache.fixed,
            num_q_heads,
            num_kv_heads,
            cos.shape[1],
            HAS_Q_NORM=q_norm is not None,
            HAS_K_NORM=k_norm is not None,
            CODE=cache.code,
            HEAD_DIM=head_dim,
            BLOCK=triton.next_power_of_2(head_dim),
        )
    return q


@triton.jit
def _rope_cache_write_kernel(
    qkv_ptr,
    q_ptr,
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    positions_ptr,
    slots_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    norm_eps,
    key_scale,
    value_scale,
    num_q_heads,
    num_kv_heads,
    half,
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
    CODE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    num_rotated = num_q_heads + num_kv_heads
    source = qkv_ptr + (token * tl.num_programs(1) + head) * HEAD_DIM
    at = tl.arange(0, BLOCK)
    is_dim = at < HEAD_DIM
    cache_row = tl.load(slots_ptr + token).to(tl.int64) * num_kv_heads
    x = tl.load(source + at, mask=is_dim, other=0.0).to(tl.float32)
    if head >= num_rotated:
        cache_head = cache_row + head - num_rotated
        target = values_ptr + cache_head * HEAD_DIM + at
        store_head(target, x, is_dim, value_scales_ptr + cache_head, value_scale, CODE)
    else:
        # Each dimension's partner in its rotation; past the rotary part, itself.
        partner_at = tl.where(at < half, at + half, tl.where(at < 2 * half, at - half, at))
        partner = tl.load(source + partner_at, mask=is_dim, other=0.0).to(tl.float32)
        angle_at = tl.load(positions_ptr + token).to(tl.int64) * half + at % half
        is_rotary = at < 2 * half
        cos = tl.load(cos_ptr + angle_at, mask=is_rotary, other=1.0)
        sin = tl.load(sin_ptr + angle_at, mask=is_rotary, other=0.0)
        sin = tl.where(at < half, -sin, sin)
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / HEAD_DIM + norm_eps)
        if head < num_q_heads:
            if HAS_Q_NORM:
                x *= scale * tl.load(q_norm_ptr + at, mask=is_dim, other=0.0)
                partner *= scale * tl.load(q_norm_ptr + partner_at, mask=is_dim, other=0.0)
            q_at = q_ptr + (token * num_q_heads + head) * HEAD_DIM + at
            tl.store(q_at, (x * cos + partner * sin).to(q_ptr.dtype.element_ty), mask=is_dim)
        else:
            if HAS_K_NORM:
                x *= scale * tl.load(k_norm_ptr + at, mask=is_dim, other=0.0)
                partner *= scale * tl.load(k_norm_ptr + partner_at, mask=is_dim, other=0.0)
            cache_head = cache_row + head - num_q_heads
            y = x * cos + partner * sin
            target = keys_ptr + cache_head * HEAD_DIM + at
            store_head(target, y, is_dim, key_scales_ptr + cache_head, key_scale, CODE)
