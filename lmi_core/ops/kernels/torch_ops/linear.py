"""Matrix products, accumulated and returned in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from lmi_core.ops.device.packed_weight import PackedWeight


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, out_dtype: torch.dtype = torch.float32
) -> Tensor:
    """x @ weight^T + bias: [R, k], [n, k] of one dtype -> [R, n] in fp32, without a bias also in
    theirs; bias is fp32."""
    if x.dtype == torch.float32:
        return torch.nn.functional.linear(x, weight, bias)
    if x.device.type == "cuda":
        y = torch.mm(x, weight.t(), out_dtype=out_dtype)
        return y if bias is None else y.add_(bias)
    return torch.nn.functional.linear(x.float(), weight.float(), bias).to(out_dtype)


def linear_packed(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, *, unpacked: Tensor | None = None
) -> Tensor:
    """x @ weight^T + bias with an int4 weight: [R, k] -> fp32 [R, n]; bias is fp32. ``unpacked``:
    at least ``weight.unpacked_bytes`` to unpack the weight into for many rows. Here it is unpacked
    anew at every call, correct everywhere, fast nowhere."""
    return torch.nn.functional.linear(x.float(), weight.unpack(), bias)
