"""Caches of 8-bit codes, and what they stand for."""

from __future__ import annotations

import torch

from lmi_core.ops.device.paged_cache import CacheScales, FixedScales, Scales
from tests.ops.paged_case import PagedCase

CODES = {
    "int8": torch.int8,
    "fp8_e4m3fn": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
FP8 = [name for name in CODES if name != "int8"]
STEPS = FixedScales(0.75, 1.5)
"""Of fp8 codes."""


def coded_cache(
    case: PagedCase, device: torch.device, stored: str
) -> tuple[tuple[torch.Tensor, torch.Tensor], Scales, list[torch.Tensor]]:
    """Keys and values, their scales, and what they stand for in float64."""
    codes = case.cache(device, CODES[stored], is_filled=True)
    if stored != "int8":
        return codes, STEPS, [c.double() * s for c, s in zip(codes, STEPS, strict=True)]
    steps = [0.01 + 0.05 * store[..., 0].abs() for store in case.cache(device, torch.float32)]
    read = [c * s.unsqueeze(-1).double() for c, s in zip(codes, steps, strict=True)]
    return codes, CacheScales(*steps), read
