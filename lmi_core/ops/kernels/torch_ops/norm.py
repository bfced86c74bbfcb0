"""Root mean square normalisation, and others, of rows and of heads."""

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
    addend: Tensor | None = None,
    codes: RowFormat | None = None,
) -> Tensor | QuantizedRows:
    """fp32 [R, n] -> [R, n]: ``layer`` (x - mean) / sqrt(var + eps), ``rms`` without the mean,
    ``none`` x; times weight, plus bias. ``addend`` and ``codes`` as ``rms_norm``. Here over the
    last dimension of any shape."""
    if addend is not None:
        x.add_(addend)
    if kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    if kind != "none":
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    x = x if weight is None else x * weight
    y = (x if bias is None else x + bias).to(out_dtype)
    return y if codes is None else quantize_rows(y, codes)


def norm_heads(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    kind: str,
    first_column: int,
    num_groups: int,
) -> Tensor:
    """``norm`` of columns from ``first_column`` on, as many as ``weight`` has, in groups: fp32
    [R, n], in place and returned."""
    columns = slice(first_column, first_column + weight.numel())
    groups = x[:, columns].reshape(len(x), num_groups, -1)
    scale = weight.view(num_groups, -1)
    offset = None if bias is None else bias.view(num_groups, -1)
    normed = norm(groups, scale, offset, eps, kind=kind, out_dtype=torch.float32)
    assert isinstance(normed, Tensor)
    x[:, columns] = normed.flatten(1)
    return x
