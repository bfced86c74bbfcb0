"""What the smoke compares: random operands, and differences beside what formats allow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ALLOWED = {"fp32": 2.0**-16, "bf16": 2.0**-6, "codes": 2.0**-5}
"""Of what sums up to fp32; of results in bf16; and of rows that were rounded to 8 bits, or of sums
of fp8 products, of which some devices keep 14 bits."""


def within(difference: float, allowed: float) -> dict[str, Any]:
    if not difference <= allowed:  # NaN is wrong, too
        raise AssertionError(f"a difference of {difference:.2e}, allowed is {allowed:.2e}")
    return {"difference": difference, "allowed": allowed}


def randoms(device: str, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(device)
