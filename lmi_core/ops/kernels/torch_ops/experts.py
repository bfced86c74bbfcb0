"""Routing and grouping of a mixture of experts."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from lmi_core.ops.device.expert_rows import ExpertRows, ExpertTable


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
    """Ids ascending, then weights: fp32 [T, experts] -> [T, 2 top_k]; see ``ops.route``."""
    if scoring == "sparsemixer":
        ids, weights = _mix_sparsely(logits, top_k, threshold)
    else:
        scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
        chances = scores if bias is None else scores + bias
        if top_groups < num_groups:
            groups = chances.view(len(chances), num_groups, -1)
            best = _top(groups.topk(group_best, -1).values.sum(-1), top_groups)
            where = best.unsqueeze(-1).expand(-1, -1, groups.shape[2])
            kept = torch.zeros_like(groups, dtype=torch.bool).scatter_(1, where, True)
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
    left, ids, weights = logits, _top(logits, top_k), []
    for best in ids.T.unsqueeze(-1):
        most = left.gather(1, best)
        is_far = (most - logits) / torch.maximum(logits.abs(), most) > threshold
        weights.append(left.masked_fill(is_far, -torch.inf).softmax(-1).gather(1, best))
        left = left.scatter(1, best, -torch.inf)
    return ids, torch.cat(weights, 1)


def group_rows(routes: Tensor, num_experts: int) -> ExpertRows:
    """A step's rows by ascending expert, then token: [T, 2 top_k] as ``route`` gives them."""
    ids = routes.chunk(2, dim=1)[0]
    flat = ids.flatten().int()
    order = flat.argsort(stable=True)
    places = torch.empty_like(flat)
    places[order] = torch.arange(len(flat), dtype=torch.int32, device=flat.device)
    experts = torch.arange(num_experts + 1, dtype=torch.int32, device=flat.device)
    return ExpertRows(
        token_rows=(order // ids.shape[1]).int(),
        places=places.view(ids.shape),
        first_rows=torch.searchsorted(flat[order], experts).int(),
    )


def grouped_linear(
    x: Tensor,
    routes: Tensor | None,
    rows: ExpertRows,
    table: ExpertTable,
    bias: Tensor | None,
    *,
    is_by_token: bool,
    sums: Tensor | None = None,
) -> Tensor | None:
    """Each row of ``rows`` times its expert's matrix, plus ``bias`` [experts, n]: x [T, k], if
    ``is_by_token``, or [R, k] -> fp32 [R, n]. With ``sums`` [T, n] they are multiplied by their
    weights of ``routes`` and added to these, of each token in ascending order of experts. Here the
    host waits."""
    results = []
    for expert, (first, end) in enumerate(pairwise(rows.first_rows.tolist())):
        if first < end:
            own = x[rows.token_rows[first:end]] if is_by_token else x[first:end]
            added = None if bias is None else bias[expert]
            results.append(table.multiply(expert, own, added))
    y = torch.cat(results)
    if sums is None:
        return y
    assert routes is not None
    weights = routes.chunk(2, dim=1)[1]
    for choice in range(weights.shape[1]):
        sums += y[rows.places[:, choice]] * weights[:, choice : choice + 1]
    return None


def head_linear(x: Tensor, table: ExpertTable, *, out_dtype: torch.dtype) -> Tensor:
    """Each head's columns times its own matrix: [T, heads k] -> [T, heads n]."""
    columns = x.chunk(len(table.experts), dim=1)
    parts = [table.multiply(head, part, None) for head, part in enumerate(columns)]
    return torch.cat(parts, dim=1).to(out_dtype)
