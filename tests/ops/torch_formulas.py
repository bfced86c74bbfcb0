"""Formulas of the reference, each as its definition has it, on tensors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def routes(
    logits: Tensor,
    *,
    top_k: int,
    scoring: str,
    bias: Tensor | None,
    num_groups: int,
    top_groups: int,
    group_best: int,
    normalizes: bool,
    scale: float,
    threshold: float,
) -> Tensor:
    """Row by row, as the definitions have it."""
    rows = []
    for row in logits:
        if scoring == "sparsemixer":
            chosen = _sparse_mixture(row.tolist(), top_k, threshold)
        else:
            scores = row.softmax(-1) if scoring == "softmax" else row.sigmoid()
            chances = scores if bias is None else scores + bias
            groups = [
                sorted(group, reverse=True) for group in chances.view(num_groups, -1).tolist()
            ]
            order = sorted(range(num_groups), key=lambda g: -sum(groups[g][:group_best]))
            size = len(chances) // num_groups
            ids = [i for i in range(len(chances)) if i // size in order[:top_groups]]
            best = sorted(ids, key=lambda i: -chances[i].item())[:top_k]
            chosen = {i: scores[i].item() for i in best}
        total = sum(chosen.values()) if normalizes else 1.0
        ids = sorted(chosen)
        rows.append([*map(float, ids), *(chosen[i] / total * scale for i in ids)])
    return torch.tensor(rows, dtype=logits.dtype)


def _sparse_mixture(logits: list[float], top_k: int, threshold: float) -> dict[int, float]:
    chosen: dict[int, float] = {}
    for _ in range(top_k):
        left = [i for i in range(len(logits)) if i not in chosen]
        best = max(left, key=lambda i: logits[i])
        most = logits[best]
        near = [i for i in left if (most - logits[i]) / max(abs(logits[i]), most) <= threshold]
        chosen[best] = 1.0 / sum(np.exp(logits[i] - most) for i in near)
    return chosen


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str) -> Tensor:
    if kind == "layer":
        x = torch.nn.functional.layer_norm(x, x.shape[-1:], eps=eps)
    elif kind == "rms":
        x = torch.nn.functional.rms_norm(x, x.shape[-1:], eps=eps)
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def activated(x: Tensor, activation: str, gated: bool) -> Tensor:
    function = torch.nn.functional
    x, up = x.chunk(2, dim=-1) if gated else (x, None)
    if activation == "silu":
        y = function.silu(x)
    elif activation == "clamped_swiglu":
        assert up is not None
        x, up = x.clamp(max=7.0), up.clamp(-7.0, 7.0) + 1.0
        y = x * torch.sigmoid(1.702 * x)
    elif activation.startswith("gelu"):
        y = function.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
    else:
        y = function.relu(x) ** (2 if activation == "relu2" else 1)
    return y if up is None else y * up


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    scale: float,
    window: int,
    soft_cap: float,
    slopes: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    """q [rows, hq, d] at ``positions`` over k, v [kv length, hkv, d] -> [rows, hq, d]."""
    num_groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(num_groups, dim=1), v.repeat_interleave(num_groups, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    distance = positions.unsqueeze(1) - torch.arange(k.shape[0])
    if slopes is not None:
        scores = scores - slopes[:, None, None] * distance
    hidden = distance < 0
    if window:
        hidden |= distance >= window
    weights = scores.masked_fill(hidden, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks[:, None, None].exp()
    weights = weights / total
    return torch.einsum("hqk,khd->qhd", weights, v)
