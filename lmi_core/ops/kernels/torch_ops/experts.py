"""Routing and grouping of a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def route(
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
    """Ids ascending, then weights: [T, experts] -> [T, 2 top_k]; see ``ops.route``."""
    if scoring == "sparsemixer":
        ids, weights = _mix_sparsely(logits, top_k, threshold)
    else:
        scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
        chances = scores if bias is None else scores + bias
        if top_groups < num_groups:
            groups = chances.view(len(chances), num_groups, -1)
            best = _top(groups.topk(group_best, -1).values.sum(-1), top_groups)
            kept = torch.zeros_like(groups, dtype=torch.bool).index_put_(
                (torch.arange(len(best), device=best.device).unsqueeze(1), best),
                torch.tensor(True, device=best.device),
            )
            chances = groups.masked_fill(~kept, -torch.inf).flatten(1)
        ids = _top(chances, top_k)
        weights = scores.gather(1, ids)
    ids, order = ids.sort(-1)
    weights = weights.gather(1, order)
    if normalizes:
        weights = weights / weights.sum(-1, keepdim=True)
    return torch.cat([ids.to(weights.dtype), weights * scale], dim=1)


def _top(values: Tensor, count: int) -> Tensor:
    """Ids of the greatest, of equals the first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _mix_sparsely(logits: Tensor, top_k: int, threshold: float) -> tuple[Tensor, Tensor]:
    left, ids, weights = logits, [], []
    for _ in range(top_k):
        best = _top(left, 1)
        most = left.gather(1, best)
        is_far = (most - logits) / torch.maximum(logits.abs(), most) > threshold
        weights.append(left.masked_fill(is_far, -torch.inf).softmax(-1).gather(1, best))
        ids.append(best)
        left = left.scatter(1, best, -torch.inf)
    return torch.cat(ids, 1), torch.cat(weights, 1)


@dataclass(frozen=True, slots=True)
class ExpertRun:
    """An expert's rows: ``rows`` of those sorted by expert, which are tokens' ``token_rows``."""

    expert: int
    rows: slice
    token_rows: Tensor
    weights: Tensor


def group_rows(routes: Tensor, num_experts: int) -> list[ExpertRun]:
    """A step's rows by ascending expert, then token. The host waits for the counts."""
    ids, weights = routes.chunk(2, dim=1)
    top_k = ids.shape[1]
    flat = ids.flatten().long()
    order = flat.argsort(stable=True)
    tokens, sorted_weights = order // top_k, weights.flatten()[order]
    runs, first = [], 0
    for expert, count in enumerate(flat.bincount(minlength=num_experts).tolist()):
        rows = slice(first, first + count)
        if count:
            runs.append(ExpertRun(expert, rows, tokens[rows], sorted_weights[rows]))
        first += count
    return runs
