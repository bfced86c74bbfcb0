"""Normalisation over the hidden dimension."""

from __future__ import annotations

from lmi_core.ops.graph import Handle
from lmi_core.weights.formats import FloatArray


def rms_norm(x: Handle, weight: FloatArray, eps: float) -> Handle:
    """x / sqrt(mean(x^2) + eps) * weight, computed in fp32: fp32 [R, n] -> act [R, n]."""
    if weight.shape != (x.columns,):
        raise ValueError(f"rms_norm of {x.columns} columns got a weight of shape {weight.shape}")
    y = x.graph.value("norm", "act", x.columns, x.rows)
    x.graph.add("rms_norm", y, {"x": x}, weight=weight, eps=eps)
    return y
