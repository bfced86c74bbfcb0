"""Normalisation over the hidden dimension, and over heads."""

from __future__ import annotations

from typing import Literal

from lmi_core.ops.graph import Handle, NormKind
from lmi_core.weights.formats import FloatArray


def rms_norm(x: Handle, weight: FloatArray, eps: float) -> Handle:
    """x / sqrt(mean(x^2) + eps) * weight, computed in fp32: fp32 [R, n] -> act [R, n]."""
    if weight.shape != (x.columns,):
        raise ValueError(f"rms_norm of {x.columns} columns got a weight of shape {weight.shape}")
    y = x.graph.value("norm", "act", x.columns, x.rows)
    x.graph.add("rms_norm", y, {"x": x}, weight=weight, eps=eps)
    return y


def norm(
    x: Handle,
    weight: FloatArray | None,
    bias: FloatArray | None,
    eps: float,
    *,
    kind: NormKind,
    residual: Handle | None = None,
    out_dtype: Literal["fp32", "act"] = "act",
) -> Handle:
    """(x - mean) / sqrt(var + eps) * weight + bias in fp32, of ``rms`` without the mean, of
    ``none`` x alone: fp32 [R, n] -> [R, n]. None: ones, zeros. ``residual``: fp32 [R, n], added to
    in place and returned."""
    is_plain = kind == "rms" and residual is None and out_dtype == "act"
    if is_plain and weight is not None and bias is None:
        return rms_norm(x, weight, eps)
    for array in (weight, bias):
        if array is not None and array.shape != (x.columns,):
            raise ValueError(f"norm of {x.columns} columns got an array of shape {array.shape}")
    settings = {"weight": weight, "bias": bias, "eps": eps, "kind": kind, "out_dtype": out_dtype}
    if residual is not None:
        x.graph.add("norm", residual, {"x": x, "residual": residual}, **settings)
        return residual
    y = x.graph.value("norm", out_dtype, x.columns, x.rows)
    x.graph.add("norm", y, {"x": x}, **settings)
    return y


def norm_heads(
    x: Handle,
    weight: FloatArray,
    bias: FloatArray | None,
    eps: float,
    *,
    kind: NormKind,
    first_column: int,
    num_groups: int,
) -> Handle:
    """Columns from ``first_column`` on of fp32 [R, n], as many as ``weight`` has, in groups that
    are normed each on its own, in place; x is returned."""
    x.graph.add(
        "norm_heads",
        x,
        {"x": x},
        weight=weight,
        bias=bias,
        eps=eps,
        kind=kind,
        first_column=first_column,
        num_groups=num_groups,
    )
    return x


def norm_all_heads(
    qkv: Handle,
    q_weight: FloatArray,
    k_weight: FloatArray,
    eps: float,
    *,
    head_dim: int,
    num_alike: int,
) -> Handle:
    """Heads of queries, fp32 [T, n] from the first column on, normed all together by their root
    mean square, and then those of keys, in place; qkv is returned. A rank has some of the model's
    heads; of keys ``num_alike`` neighbouring ranks have the same. Squares are added up by head, so
    that bits don't depend on how many ranks there are."""
    qkv.graph.add(
        "norm_all_heads",
        qkv,
        {"qkv": qkv},
        q_weight=q_weight,
        k_weight=k_weight,
        eps=eps,
        head_dim=head_dim,
        num_alike=num_alike,
    )
    return qkv
