"""Ops in plain torch, a row at a time, so that no row's result depends on the rows beside it.

A library's sums may go another way for another shape; here every call has the shape that the same
row always has. ``EagerGraph`` runs whole forward passes row by row; ``sample`` does it itself.
"""

from __future__ import annotations

from functools import partial

from lmi_core.ops.kernels.torch_ops import (
    attention,
    gated_activation,
    linear,
    linear_packed,
    linear_quantized,
    rms_norm,
    rope_cache_write,
)
from lmi_core.ops.kernels.torch_ops import sample as sample_together

__all__ = [
    "attention",
    "gated_activation",
    "linear",
    "linear_packed",
    "linear_quantized",
    "rms_norm",
    "rope_cache_write",
    "sample",
]

sample = partial(sample_together, is_by_row=True)
