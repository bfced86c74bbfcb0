"""Attention over the paged cache by gathering it: correct everywhere, fast nowhere."""

from __future__ import annotations

import torch
from torch import Tensor

from lmi_core.ops.device.device_step import DeviceStep
from lmi_core.ops.device.paged_cache import CacheScales, Scales

MAX_GATHERED_TOKENS = 1 << 16
"""Cached tokens gathered at once for sequences with one row."""
MAX_SCORE_ROWS = 256
"""Query rows of a prefill whose scores are held at once."""


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
    """Attention with grouped queries, causal unless ``sees_later``: [T, hq d] -> [T, hq d] in q's
    dtype.

    keys, values: one layer's [slots, hkv, d]. ``window``: keys seen counting the query's own; 0:
    all. ``soft_cap``: 0: none. ``scales``: of 8-bit keys and values.
    ``slopes``: [hq], ALiBi's. ``sinks``: [hq], of scores without values. ``sees_later``,
    ``relative``: of ``ops.attention``.
    """
    queries = q.view(len(q), num_q_heads, -1)
    y = torch.empty_like(queries)

    def attend(rows: Tensor, seqs: Tensor, num_keys: int) -> None:
        """Sequences ``seqs`` [B], each with its token rows ``rows`` [B, R], over their keys."""
        slots, is_cached = _slots(step, seqs, num_keys)
        k, v = keys[slots].float(), values[slots].float()
        if isinstance(scales, CacheScales):
            k *= scales.keys[slots].unsqueeze(-1)
            v *= scales.values[slots].unsqueeze(-1)
        elif scales is not None:
            k, v = k * scales.keys, v * scales.values
        v.masked_fill_(~is_cached[..., None, None], 0.0)
        distance = step.positions[rows].unsqueeze(2) - torch.arange(num_keys, device=q.device)
        hidden = ~is_cached.unsqueeze(1) if sees_later else distance < 0
        if window:
            hidden = hidden | (distance.abs() >= window)
        bias = None if slopes is None else slopes[:, None, None] * -distance.unsqueeze(1)
        if relative is not None:
            bias = relative[:, relative.shape[1] // 2 - distance].transpose(0, 1)
        result = _attend(queries[rows].float(), k, v, hidden, scale, soft_cap, bias, sinks)
        y[rows] = result.to(y.dtype)

    host = step.host
    decode = [seq for seq, num_rows in enumerate(host.num_rows.tolist()) if num_rows == 1]
    for seqs, num_keys in _batches(decode, host.kv_lengths.tolist()):
        seq_ids = torch.tensor(seqs, device=q.device)
        attend(step.first_rows[seq_ids].unsqueeze(1), seq_ids, num_keys)
    for seq, num_rows in enumerate(host.num_rows.tolist()):
        if num_rows == 1:
            continue
        seq_ids = torch.tensor([seq], device=q.device)
        first, kv_length = int(host.first_rows[seq]), int(host.kv_lengths[seq])
        for start in range(0, num_rows, MAX_SCORE_ROWS):
            end = min(start + MAX_SCORE_ROWS, num_rows)
            rows = torch.arange(first + start, first + end, device=q.device)
            num_keys = kv_length if sees_later else kv_length - num_rows + end
            attend(rows.unsqueeze(0), seq_ids, num_keys)
    return y.flatten(1)


def _batches(seqs: list[int], kv_lengths: list[int]) -> list[tuple[list[int], int]]:
    """Sequences of like length together, with the number of keys that each batch gathers."""
    batches: list[tuple[list[int], int]] = []
    batch: list[int] = []
    for seq in sorted(seqs, key=lambda seq: -kv_lengths[seq]):
        if batch and (len(batch) + 1) * kv_lengths[batch[0]] > MAX_GATHERED_TOKENS:
            batches.append((batch, kv_lengths[batch[0]]))
            batch = []
        batch.append(seq)
    if batch:
        batches.append((batch, kv_lengths[batch[0]]))
    return batches


def _slots(step: DeviceStep, seqs: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """Slots of the first ``num_keys`` positions [B, num_keys], and which of them hold tokens."""
    positions = torch.arange(num_keys, device=seqs.device)
    blocks = step.block_tables[seqs][:, positions // step.block_size].long()
    slots = blocks * step.block_size + positions % step.block_size
    return slots, positions < step.kv_lengths[seqs].unsqueeze(1)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    hidden: Tensor,
    scale: float,
    soft_cap: float,
    bias: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    """q [B, R, hq, d] over k, v [B, K, hkv, d], hidden [B, R, K], bias of scores [B, hq, R, K] ->
    [B, R, hq, d]."""
    num_batches, num_rows, num_q_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    grouped = q.view(num_batches, num_rows, num_kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
    scores = torch.einsum("bhgrd,bkhd->bhgrk", grouped, k) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if bias is not None:
        scores = scores + bias.view(scores.shape)
    scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
    if sinks is not None:
        column = sinks.view(1, num_kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    y = torch.einsum("bhgrk,bkhd->brhgd", weights, v)
    return y.reshape(num_batches, num_rows, num_q_heads, head_dim)
