"""The step graph as model code records it, once, for any device: nodes in order, with the values
that they read and give and what is constant in them; and the ops that append nodes, but for those
of experts, of kept rows and of ranks.

A device lowers nodes to what it runs: ``ops.cpu`` to kernels on the CPU, ``ops.device.eager``
to torch calls, ``ops.device.step_lowering`` to a list that C++ launches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from lmi_core.ops.operands import (
    JoinedWeight,
    KvCache,
    LinearWeight,
    LoraTable,
    SlicedWeight,
    Table,
)
from lmi_core.weights.block_matrix import BlockMatrix
from lmi_core.weights.formats import FloatArray

__all__ = [
    "Graph",
    "Handle",
    "activation",
    "add_positions",
    "add_token_types",
    "attention",
    "clip",
    "embed",
    "gated_activation",
    "gather_logit_rows",
    "head_linear",
    "linear",
    "lora_add",
    "norm",
    "norm_heads",
    "output",
    "rms_norm",
    "rope_cache_write",
    "sample",
    "soft_cap",
]

RowSymbol = Literal["T", "L", "E"]
"""Tokens, rows of logits, and experts of tokens."""
NormKind = Literal["none", "rms", "layer"]
Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "relu2", "clamped_swiglu"]


@dataclass(frozen=True, slots=True, eq=False)
class Handle:
    """A value of a graph: no data, no arithmetic, no truth value."""

    graph: Graph
    name: str
    dtype: str
    columns: int
    rows: RowSymbol

    def __bool__(self) -> NoReturn:
        raise TypeError(f"{self.name} has no value while a graph is recorded: don't branch on it")


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """An op and what it is given, by its parameters' names."""

    op: str
    operands: Mapping[str, Handle]
    result: Handle | None
    """One of the operands where the op adds to it in place; None: the step's results."""
    attributes: Mapping[str, Any]
    """Weights, caches, tables and numbers."""


_Result = TypeVar("_Result", Handle, None)


class Graph:
    """A forward pass and its sampling. ``act_dtype``: of what products and attention read."""

    def __init__(self, act_dtype: Literal["fp32", "bf16"]) -> None:
        self.act_dtype: Literal["fp32", "bf16"] = act_dtype
        self.nodes: list[Node] = []

    def value(
        self, op: str, dtype: Literal["fp32", "act"], columns: int, rows: RowSymbol
    ) -> Handle:
        """For the result of the next node."""
        stored = self.act_dtype if dtype == "act" else dtype
        return Handle(self, f"{op}{len(self.nodes)}", stored, columns, rows)

    def add(
        self, op: str, result: _Result, operands: Mapping[str, Handle], **attributes: Any
    ) -> _Result:
        self.nodes.append(Node(op, operands, result, attributes))
        return result


def embed(graph: Graph, table: Table, *, scale: float = 1.0) -> Handle:
    """Rows of ``table`` [vocab, hidden] (fp32, bf16 as uint16, or blocks) -> fp32 [T, hidden]."""
    x = graph.value("embed", "fp32", table.shape[1], "T")
    return graph.add("embed", x, {}, scale=scale, **_stored(table))


def add_positions(x: Handle, table: Table, *, offset: int = 0) -> Handle:
    """x + the row of ``table`` of each token's position + ``offset``: fp32 [T, n], in place."""
    return x.graph.add("add_positions", x, {"x": x}, offset=offset, **_stored(table))


def add_token_types(x: Handle, table: npt.NDArray[np.generic]) -> Handle:
    """x + the row of ``table`` of each token's type: fp32 [T, n], in place. Types are 1 for the
    second text of a pair, else 0."""
    return x.graph.add("add_token_types", x, {"x": x}, table=table)


def _stored(table: Table) -> dict[str, object]:
    if isinstance(table, BlockMatrix):
        return {"table": table.blocks, "format": table.format}
    return {"table": table}


def gather_logit_rows(x: Handle) -> Handle:
    """fp32 [T, n] -> fp32 [L, n]: the rows whose logits are wanted."""
    y = x.graph.value("gathered", "fp32", x.columns, "L")
    return x.graph.add("gather_logit_rows", y, {"x": x})


def rms_norm(x: Handle, weight: FloatArray, eps: float) -> Handle:
    """x / sqrt(mean(x^2) + eps) * weight, computed in fp32: fp32 [R, n] -> act [R, n]."""
    if weight.shape != (x.columns,):
        raise ValueError(f"rms_norm of {x.columns} columns got a weight of shape {weight.shape}")
    y = x.graph.value("norm", "act", x.columns, x.rows)
    return x.graph.add("rms_norm", y, {"x": x}, weight=weight, eps=eps)


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
        return x.graph.add("norm", residual, {"x": x, "residual": residual}, **settings)
    y = x.graph.value("norm", out_dtype, x.columns, x.rows)
    return x.graph.add("norm", y, {"x": x}, **settings)


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
    return x.graph.add(
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


def linear(
    x: Handle,
    weight: LinearWeight | JoinedWeight | SlicedWeight,
    *,
    bias: FloatArray | None = None,
    activation: Activation | Literal[""] = "",
    gated: bool = True,
    residual: Handle | None = None,
    out_dtype: Literal["fp32", "act"] = "fp32",
    slice_adapters: tuple[LoraTable, list[int]] | None = None,
) -> Handle:
    """x @ weight^T + bias: act [R, k] -> [R, n], accumulated in fp32.

    ``activation``: ``weight`` holds gate and up, the result is act(gate) * up, act [R, n / 2]; not
    ``gated``, act(y), act [R, n].
    ``residual``: fp32 [R, n], added to in place and returned.
    A sliced weight's sums go over the slices of all ranks, with what adapters add to each by
    ``slice_adapters``: the table, and a linear id for each slice.
    """
    if x.columns != weight.num_inputs:
        raise ValueError(f"linear over {weight.num_inputs} inputs got {x.name}, {x.columns} wide")
    if bias is not None and bias.shape != (weight.num_outputs,):
        raise ValueError(f"linear to {weight.num_outputs} outputs got a bias of {bias.shape}")
    if isinstance(weight, SlicedWeight):
        return _summed(x, weight, bias, residual, slice_adapters)
    settings: dict[str, object] = {"weight": weight, "bias": bias, "activation": activation}
    settings["out_dtype"] = out_dtype
    if activation and not gated:
        settings["gated"] = False
    if residual is not None:
        return x.graph.add("linear", residual, {"x": x, "residual": residual}, **settings)
    columns = weight.num_outputs // 2 if activation and gated else weight.num_outputs
    y = x.graph.value("linear", "act" if activation else out_dtype, columns, x.rows)
    return x.graph.add("linear", y, {"x": x}, **settings)


def _summed(
    x: Handle,
    weight: SlicedWeight,
    bias: FloatArray | None,
    residual: Handle | None,
    adapters: tuple[LoraTable, list[int]] | None,
) -> Handle:
    operands, y = {"x": x}, residual
    if y is None:
        y = x.graph.value("summed_linear", "fp32", weight.num_outputs, x.rows)
    else:
        operands["residual"] = y
    added = {} if adapters is None else {"table": adapters[0], "linear_ids": adapters[1]}
    return x.graph.add("summed_linear", y, operands, slices=weight, bias=bias, **added)


def head_linear(
    x: Handle, weight: LinearWeight, *, num_heads: int, out_dtype: Literal["fp32", "act"] = "fp32"
) -> Handle:
    """Each head's columns times its own matrix: act [R, heads k] -> [R, heads n].

    ``weight``: of all heads, as experts are packed, in the act dtype."""
    if x.columns != num_heads * weight.num_inputs:
        raise ValueError(
            f"{num_heads} heads of {weight.num_inputs} inputs got {x.name}, {x.columns} wide"
        )
    y = x.graph.value("head_linear", out_dtype, num_heads * weight.num_outputs, x.rows)
    return x.graph.add(
        "head_linear", y, {"x": x}, weight=weight, num_heads=num_heads, out_dtype=out_dtype
    )


def gated_activation(x: Handle, activation: Activation) -> Handle:
    """act(gate) * up: fp32 [R, 2 n], gate before up -> act [R, n]; for where ``linear`` can't do it
    itself, since something is added to its results first."""
    y = x.graph.value("gated", "act", x.columns // 2, x.rows)
    return x.graph.add("gated_activation", y, {"x": x}, activation=activation)


def activation(x: Handle, activation: Activation) -> Handle:
    """act(x): fp32 [R, n] -> act [R, n], as ``gated_activation``."""
    y = x.graph.value("activated", "act", x.columns, x.rows)
    return x.graph.add("activation", y, {"x": x}, activation=activation)


def soft_cap(x: Handle, cap: float) -> Handle:
    """cap tanh(x / cap), fp32 in place."""
    return x.graph.add("soft_cap", x, {"x": x}, cap=cap)


def clip(x: Handle, cap: float) -> Handle:
    """x between -cap and cap, fp32 in place."""
    return x.graph.add("clip", x, {"x": x}, cap=cap)


def lora_add(x: Handle, y: Handle, table: LoraTable, linear_id: int) -> Handle:
    """y + B A x for the token rows that have an adapter, with that adapter's A and B: act [T, k],
    fp32 [T, n], added to in place and returned. A x is rounded to the act dtype."""
    return x.graph.add("lora_add", y, {"x": x, "y": y}, table=table, linear_id=linear_id)


def rope_cache_write(
    qkv: Handle,
    cache: KvCache,
    layer: int,
    *,
    num_q_heads: int,
    cos: FloatArray,
    sin: FloatArray,
    q_norm: FloatArray | None = None,
    k_norm: FloatArray | None = None,
    norm_eps: float = 0.0,
    latent: Handle | None = None,
) -> Handle:
    """Norm (optional) and rotate heads, write K and V to the cache, return q.

    fp32 qkv [T, (hq + 2 hkv) d] -> act q [T, hq d]. cos, sin: [positions, rotary / 2]. ``latent``:
    fp32 [T, d], the one key, which is the value, too, of a cache of keys alone; ``qkv`` holds
    queries alone then.
    """
    q = qkv.graph.value("q", "act", num_q_heads * cache.head_dim, "T")
    return qkv.graph.add(
        "rope_cache_write",
        q,
        {"qkv": qkv} if latent is None else {"qkv": qkv, "latent": latent},
        cache=cache,
        layer=layer,
        num_q_heads=num_q_heads,
        cos=cos,
        sin=sin,
        q_norm=q_norm,
        k_norm=k_norm,
        norm_eps=norm_eps,
    )


def attention(
    q: Handle,
    cache: KvCache,
    layer: int,
    *,
    num_q_heads: int,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    slopes: FloatArray | None = None,
    sinks: FloatArray | None = None,
    sees_later: bool = False,
    relative: FloatArray | None = None,
) -> Handle:
    """Causal attention with grouped queries: act [T, hq d] -> act [T, hq d].

    ``window``: keys seen counting the query's own; 0: all. ``soft_cap``: 0: none. ``slopes``: [hq],
    a head's scores grow by its slope times the key's position less the query's (ALiBi).
    ``sinks``: [hq], a head's score that has no value, but its share of the softmax.
    ``sees_later``: sequences are in the step as a whole, and a token sees all of its own, or the
    keys nearer than ``window``. ``relative``: [hq, 2 n], what is added to a head's score by the
    key's position less the query's plus n, of which the longest distance is at most n - 16.
    """
    y = q.graph.value("attention", "act", q.columns, "T")
    bias: dict[str, object] = {} if slopes is None else {"slopes": slopes}
    if sinks is not None:
        bias["sinks"] = sinks
    if sees_later:
        bias |= {"sees_later": True, "relative": relative}
    return q.graph.add(
        "attention",
        y,
        {"q": q},
        cache=cache,
        layer=layer,
        num_q_heads=num_q_heads,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        **bias,
    )


def output(x: Handle) -> None:
    """Keeps a value readable after the step."""
    x.graph.add("output", None, {"x": x})


def sample(logits: Handle) -> None:
    """fp32 [L, vocab]: sampled ids and log-probabilities go to the step's results."""
    logits.graph.add("sample", None, {"logits": logits})


def quantized_rows(graph: Graph) -> dict[Handle, LinearWeight | JoinedWeight]:
    """The values that nobody reads but products that quantise their rows, all of them alike, with a
    weight of these. Who makes the value may give it quantised."""
    readers: dict[Handle, list[LinearWeight | JoinedWeight | None]] = {}
    for node in graph.nodes:
        for name, handle in node.operands.items():
            is_product = node.op in ("linear", "gathered_linear") and name == "x"
            reader = node.attributes["weight"] if is_product else None
            readers.setdefault(handle, []).append(reader)
    result = {}
    for handle, weights in readers.items():
        formats = {None if weight is None else weight.row_format for weight in weights}
        if weights[0] is not None and len(formats) == 1 and None not in formats:
            result[handle] = weights[0]
    return result
