"""Root mean square normalisation, and others."""

from __future__ import annotations

import torch
from torch import Tensor

from lmi_core.ops.device.quantized_rows import QuantizedRows, RowFormat
from lmi_core.ops.kernels.torch_ops.linear_quantized import quantize_rows


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    out_dtype: torch.dtype,
    addend: Tensor | None = None,
    codes: RowFormat | None = None,
) -> Tensor | QuantizedRows:
    """x / sqrt(mean(x^2) + eps) * weight, fp32 [R, n] -> [R, n]; ``addend`` is added to x first,
    in place. ``codes``: the result, rounded to ``out_dtype``, quantised for such weights."""
    if addend is not None:
        x.add_(addend)
    y = normalized(x, weight, eps).to(out_dtype)
    return y if codes is None else quantize_rows(y, codes)


def normalized(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same over the last dimension of any shape, in fp32."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    kind: str,
    out_dtype: torch.dtype,
    codes: RowFormat | None = None,
) -> Tensor | QuantizedRows:
    """Over the last dimension of any shape, in fp32: ``layer`` (x - mean) / sqrt(var + eps),
    ``rms`` without the mean, ``none`` x; times weight, plus bias. ``codes`` as ``rms_norm``."""
    if kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    if kind != "none":
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    x = x if weight is None else x * weight
    y = (x if bias is None else x + bias).to(out_dtype)
    return y if codes is None else quantize_rows(y, codes)
