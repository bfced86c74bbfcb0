"""Which experts a row takes: one program per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
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
    """As ``torch_ops`` has it."""
    num_tokens, num_experts = logits.shape
    y = torch.empty(num_tokens, 2 * top_k, dtype=torch.float32, device=logits.device)
    if num_tokens:
        _route_kernel[(num_tokens,)](
            logits,
            logits if bias is None else bias,
            y,
            scale,
            threshold,
            NUM_EXPERTS=num_experts,
            TOP_K=top_k,
            SCORING=scoring,
            HAS_BIAS=bias is not None,
            GROUP_SIZE=num_experts // num_groups,
            NUM_GROUPS=num_groups if top_groups < num_groups else 0,
            TOP_GROUPS=top_groups,
            GROUP_BEST=group_best,
            NORMALIZES=normalizes,
            BLOCK=triton.next_power_of_2(num_experts),
        )
    return y


@triton.jit
def _best_of(chances, is_left, at, BLOCK: tl.constexpr):
    """The place of the greatest of those that are left, of equals the lowest. No NaN is greater
    than another number."""
    chances = tl.where(is_left & (chances == chances), chances, float("-inf"))
    is_best = is_left & (chances == tl.max(chances, 0))
    return tl.min(tl.where(is_best, at, BLOCK), 0)


@triton.jit
def _kept_groups(
    chances,
    is_expert,
    at,
    GROUP_SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Which experts are in the groups whose sums of best chances are greatest."""
    totals = tl.full([BLOCK], float("-inf"), tl.float32)
    for group in range(NUM_GROUPS):
        is_left = is_expert & (at // GROUP_SIZE == group)
        total = 0.0
        for _ in tl.static_range(GROUP_BEST):
            best = _best_of(chances, is_left, at, BLOCK)
            total += tl.sum(tl.where(at == best, chances, 0.0), 0)
            is_left = is_left & (at != best)
        totals = tl.where(at == group, total, totals)
    is_group = at < NUM_GROUPS
    is_kept = at < 0
    for _ in range(TOP_GROUPS):
        best = _best_of(totals, is_group, at, BLOCK)
        is_kept = is_kept | (at // GROUP_SIZE == best)
        is_group = is_group & (at != best)
    return is_kept & is_expert


@triton.jit
def _route_kernel(
    logits_ptr,
    bias_ptr,
    y_ptr,
    scale,
    threshold,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORING: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    NORMALIZES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    is_expert = at < NUM_EXPERTS
    logits = tl.load(logits_ptr + row * NUM_EXPERTS + at, mask=is_expert, other=float("-inf"))
    scores = logits
    if SCORING == "softmax":
        powers = tl.exp(logits - tl.max(logits, 0))
        scores = powers / tl.sum(powers, 0)
    elif SCORING == "sigmoid":
        scores = tl.sigmoid(logits)
    chances = scores
    if HAS_BIAS:
        chances += tl.load(bias_ptr + at, mask=is_expert, other=0.0)
    is_left = is_expert
    if NUM_GROUPS > 0:
        is_left = _kept_groups(
            chances, is_expert, at, GROUP_SIZE, NUM_GROUPS, TOP_GROUPS, GROUP_BEST, BLOCK
        )
    is_chosen = at < 0
    weights = scores
    for _ in range(TOP_K):
        best = _best_of(chances, is_left, at, BLOCK)
        if SCORING == "sparsemixer":
            most = tl.sum(tl.where(at == best, logits, 0.0), 0)
            left = tl.where(is_left, logits, most)
            size = tl.maximum(tl.abs(left), most)
            is_near = (most - left) / tl.where(size > 0.0, size, 1.0) <= threshold
            powers = tl.where(is_left & is_near, tl.exp(left - most), 0.0)
            weights = tl.where(at == best, 1.0 / tl.sum(powers, 0), weights)
        is_chosen = is_chosen | (at == best)
        is_left = is_left & (at != best)
    if NORMALIZES:
        weights /= tl.sum(tl.where(is_chosen, weights, 0.0), 0)
    place = y_ptr + row * (2 * TOP_K) + tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    tl.store(place, at.to(tl.float32), mask=is_chosen)
    tl.store(place + TOP_K, weights * scale, mask=is_chosen)
