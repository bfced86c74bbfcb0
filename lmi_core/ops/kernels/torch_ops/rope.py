"""Rotary position embedding and the write to the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from lmi_core.ops.device.paged_cache import INT8_STEPS, CacheScales, Scales
from lmi_core.ops.kernels.torch_ops.norm import normalized


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
    """Norm (optional) and rotate heads, write K and V at ``slots``, return q [T, hq d].

    qkv: [T, (hq + 2 hkv) d], fp32, or bf16 where q is; keys, values: one layer's [slots, hkv, d];
    cos, sin: fp32 [positions, rotary / 2]; positions, slots: int32 [T]. ``scales``: of 8-bit keys
    and values; those of rows are written. Where ``values`` is None, qkv has none either.
    """
    num_kv_heads, head_dim = keys.shape[1:]
    heads = qkv.view(qkv.shape[0], -1, head_dim).float()
    q, k, v = heads.tensor_split((num_q_heads, num_q_heads + num_kv_heads), dim=1)
    if q_norm is not None:
        q = normalized(q, q_norm, norm_eps)
    if k_norm is not None:
        k = normalized(k, k_norm, norm_eps)
    rotation = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    parts = [(_rotate(k, *rotation), keys), (v, values)]
    for part, (x, store) in enumerate(parts if values is not None else parts[:1]):
        assert store is not None
        if isinstance(scales, CacheScales):
            x, scales[part][slots] = _quantized(x)
        elif scales is not None:
            x = _saturated(x / scales[part], keys.dtype)
        store[slots] = x.to(store.dtype)
    return _rotate(q, *rotation).flatten(1).to(out_dtype)


def _quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes and the scale [...] of each row [..., d]."""
    scale = x.abs().amax(-1, keepdim=True) / INT8_STEPS
    codes = torch.where(scale > 0, x / scale, 0.0).round().clamp(-INT8_STEPS, INT8_STEPS)
    return codes, scale.squeeze(-1)


def _saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Within the range of an 8-bit float; NaN where it isn't finite."""
    most = torch.finfo(dtype).max
    return torch.where(x.isfinite(), x.clamp(-most, most), torch.nan)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)
