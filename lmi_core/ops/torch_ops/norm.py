"""Root mean square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    out_dtype: torch.dtype,
    addend: Tensor | None = None,
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, fp32 [R, n] -> [R, n]; ``addend`` is added to x first,
    in place."""
    if addend is not None:
        x.add_(addend)
    return normalized(x, weight, eps).to(out_dtype)


def normalized(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same over the last dimension of any shape, in fp32."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
