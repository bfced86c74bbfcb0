"""Prefill attention by the flash-attn package; rows that decode stay with the project's kernels.

The package reads paged caches only in pages of 256 tokens and more. So keys and values of the
sequences that prefill are gathered first, which costs little beside their scores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from lmi_core.ops.device.device_step import DeviceStep
from lmi_core.ops.device.paged_cache import Scales
from lmi_core.ops.device.step_arrays import IntArray
from lmi_core.ops.kernels.fallback import fallback, next_best

DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256


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
) -> Tensor:
    """As ``torch_ops`` has it; what the package lacks, the project's kernels see to."""
    settings = {
        "num_q_heads": num_q_heads,
        "scale": scale,
        "window": window,
        "soft_cap": soft_cap,
        "scales": scales,
        "slopes": slopes,
        "sinks": sinks,
        "sees_later": sees_later,
        "relative": relative,
    }
    others = next_best("attention", q.device)
    if len(step.query_tiles) == 0:
        y: Tensor = others(q, keys, values, step, **settings)
        return y
    reason = not_covered(q.dtype, keys.dtype, keys.shape[-1])
    if slopes is not None or sinks is not None:
        reason = "ALiBi or attention sinks"
    if sees_later:
        reason = "tokens that see later ones"
    if reason:
        y = fallback("attention", q.device, reason, owner="flash-attn")(
            q, keys, values, step, **settings
        )
        return y
    prefills = _prefills_of(step, window)
    if len(step.single_seqs) == 0:
        return _prefill(q, keys, values, prefills, scale, window, soft_cap)
    y = others(q, keys, values, replace(step, query_tiles=step.query_tiles[:0]), **settings)
    rows = prefills.rows
    y[rows] = _prefill(q[rows], keys, values, prefills, scale, window, soft_cap)
    return y


def not_covered(dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int) -> str:
    """What of these the package doesn't have; empty if it has all."""
    if dtype not in DTYPES or cache_dtype != dtype:
        return f"{str(dtype)[6:]} queries over a cache of {str(cache_dtype)[6:]}"
    return f"heads of {head_dim}" if head_dim > MAX_HEAD_DIM or head_dim % 8 != 0 else ""


@dataclass(frozen=True, slots=True)
class _Prefills:
    """The sequences of a step with more than one row, int32 on the device."""

    rows: Tensor
    """Their token rows."""
    slots: Tensor
    """Of the keys that they see, sequence by sequence."""
    row_offsets: Tensor
    """[n + 1], into ``rows``."""
    key_offsets: Tensor
    """[n + 1], into ``slots``."""
    max_rows: int
    max_keys: int


def _prefills_of(step: DeviceStep, window: int) -> _Prefills:
    """Worked out once for all layers with the same window."""
    key = ("flash prefills", window)
    prefills = step.derived.get(key)
    if prefills is None:
        prefills = step.derived[key] = _prefills(step, window)
    assert isinstance(prefills, _Prefills)
    return prefills


def _prefills(step: DeviceStep, window: int) -> _Prefills:
    host, block_size = step.host, step.block_size
    rows, slots = [], []
    for seq in np.flatnonzero(host.num_rows > 1).tolist():
        first, count = int(host.first_rows[seq]), int(host.num_rows[seq])
        length = int(host.kv_lengths[seq])
        start = max(0, length - count + 1 - window) if window else 0
        seen = np.arange(start, length, dtype=np.int32)
        table = host.block_tables[host.table_rows[seq]]
        rows.append(np.arange(first, first + count, dtype=np.int32))
        slots.append(table[seen // block_size] * np.int32(block_size) + seen % block_size)
    arrays = [np.concatenate(rows), np.concatenate(slots), _offsets(rows), _offsets(slots)]
    sizes = [len(array) for array in arrays]
    staging = torch.from_numpy(np.concatenate(arrays))
    device = step.positions.device
    if device.type == "cuda":
        staging = staging.pin_memory()
    parts = torch.split(staging.to(device, non_blocking=True), sizes)
    return _Prefills(
        rows=parts[0],
        slots=parts[1],
        row_offsets=parts[2],
        key_offsets=parts[3],
        max_rows=max(map(len, rows)),
        max_keys=max(map(len, slots)),
    )


def _offsets(parts: list[IntArray]) -> IntArray:
    return np.cumsum([0, *map(len, parts)]).astype(np.int32)


def _prefill(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    prefills: _Prefills,
    scale: float,
    window: int,
    soft_cap: float,
) -> Tensor:
    """The last key of a sequence is that of its last row."""
    from flash_attn import flash_attn_varlen_func

    y: Tensor = flash_attn_varlen_func(
        q.view(len(q), -1, keys.shape[-1]),
        keys[prefills.slots],
        values[prefills.slots],
        prefills.row_offsets,
        prefills.key_offsets,
        prefills.max_rows,
        prefills.max_keys,
        softmax_scale=scale,
        causal=True,
        window_size=(window - 1, 0) if window else (-1, -1),
        softcap=soft_cap,
    )
    return y.reshape(q.shape)
