"""Attention over the paged cache: split over the keys for single rows, in tiles for prefills."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from lmi_core.ops.device.device_step import DeviceStep
from lmi_core.ops.device.paged_cache import CODE_DTYPES, CacheScales, Scales, fixed_of
from lmi_core.ops.kernels.cuda import library
from lmi_core.ops.kernels.cuda.attention_lists import MAX_HEAD_DIM, list_attention
from lmi_core.ops.kernels.fallback import fallback

DTYPES = (torch.bfloat16,)
MAX_LATENT_DIM = 576
"""Of heads over MAX_HEAD_DIM, whose keys are the values, too."""
NARROW_HEAD_DIM = 64
WIDE_HEAD_BYTES = 132 << 10
"""kWideHeadBytes of csrc/cuda/attention_lists.h: GPUs of sm_86 and sm_89 have less."""
MAX_GROUPS = {128: 128, 256: 64, 576: 1024}
"""Query heads of a KV head, for heads of up to so many dimensions."""


def attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    step: DeviceStep,
    *,
    num_q_heads: int,
    scale: float,
    window: int,
    soft_cap: float,
    scales: Scales = None,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    sees_later: bool = False,
    relative: Tensor | None = None,
    prefills_all: bool = False,
) -> Tensor:
    """As ``torch_ops`` has it. ``prefills_all``: rows alone are tiles of a prefill, too, which
    walks the keys in tiles at absolute positions: a row's bits are those that it has in any
    step."""
    num_kv_heads, head_dim = keys.shape[1:]
    reason = not_covered(
        *(q.dtype, keys.dtype, num_q_heads // num_kv_heads, head_dim, q.device),
        is_plain=slopes is None and sinks is None,
        is_latent=keys.data_ptr() == values.data_ptr() and not (window or soft_cap),
    )
    if sees_later:
        reason = "tokens that see later ones"
    of_scores: dict[str, object] = {"soft_cap": soft_cap, "slopes": slopes, "sinks": sinks}
    if reason:
        of_scores |= {"num_q_heads": num_q_heads, "window": window, "scale": scale}
        of_scores |= {"scales": scales, "sees_later": sees_later, "relative": relative}
        other = fallback("attention", q.device, reason)
        result: Tensor = other(q, keys, values, step, **of_scores)
        return result
    shape = {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    shape["window"] = window
    lists = list_attention(step, **shape, prefills_all=prefills_all)
    y = torch.empty_like(q)
    arguments = of_scores | shape | _operands(q, keys, values, step, scale, scales) | {"y": y}
    if len(lists.decode):
        partial = (lists.num_partials, num_q_heads)
        library.call(
            "decode_attention",
            q,
            work=lists.decode,
            num_work=len(lists.decode),
            partials=torch.empty(*partial, head_dim, dtype=torch.float32, device=q.device),
            log_masses=torch.empty(partial, dtype=torch.float32, device=q.device),
            arrivals=lists.arrivals,
            **arguments,
        )
    if len(lists.prefill):
        library.call(
            "prefill_attention",
            q,
            work=lists.prefill,
            num_work=len(lists.prefill),
            **arguments,
        )
    return y


def _operands(
    q: Tensor, keys: Tensor, values: Tensor, step: DeviceStep, scale: float, scales: Scales
) -> dict[str, object]:
    """What either kernel reads."""
    by_row = scales if isinstance(scales, CacheScales) else None
    fixed = fixed_of(scales)
    return {
        "q": q,
        "keys": keys,
        "values": values,
        "first_rows": step.first_rows,
        "num_rows": step.num_rows,
        "kv_lengths": step.kv_lengths,
        "block_tables": step.block_tables,
        "table_stride": step.block_tables.shape[1],
        "block_size": step.block_size,
        "scale": scale * fixed.keys,
        "dtype": q.dtype,
        "kv_dtype": keys.dtype,
        "value_scale": fixed.values,
        "key_scales": None if by_row is None else by_row.keys,
        "value_scales": None if by_row is None else by_row.values,
    }


def not_covered(
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    group: int,
    head_dim: int,
    device: torch.device,
    *,
    is_plain: bool = True,
    is_latent: bool = False,
) -> str:
    """What of these the kernels have not; "": they have it all. ``is_plain``: without slopes and
    sinks. ``is_latent``: keys that are the values, without windows and soft caps."""
    if q_dtype not in DTYPES or kv_dtype not in (q_dtype, *CODE_DTYPES):
        return f"{str(q_dtype)[6:]} queries over a cache of {str(kv_dtype)[6:]}"
    if not is_plain and kv_dtype != q_dtype:
        return f"ALiBi or sinks over a cache of {str(kv_dtype)[6:]}"
    is_wide = head_dim > MAX_HEAD_DIM
    if head_dim > MAX_LATENT_DIM or head_dim % 8 != 0 or (is_wide and not is_latent):
        return f"heads of {head_dim}"
    if is_wide and not is_plain:
        return f"ALiBi or sinks for heads of {head_dim}"
    if NARROW_HEAD_DIM < head_dim <= MAX_HEAD_DIM and not _has_much_shared_memory(device):
        return f"heads of {head_dim} in this GPU's shared memory"
    most = next(most for widest, most in MAX_GROUPS.items() if head_dim <= widest)
    return "" if group <= most else f"groups of {group} query heads"


@functools.cache
def _has_much_shared_memory(device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin) >= WIDE_HEAD_BYTES
