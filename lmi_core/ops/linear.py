"""Matrix products with a weight, and what is fused with them."""

from __future__ import annotations

from typing import Literal

from lmi_core.ops.graph import (
    Activation,
    Handle,
    JoinedWeight,
    LinearWeight,
    LoraTable,
    SlicedWeight,
)
from lmi_core.weights.formats import FloatArray


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
        x.graph.add("linear", residual, {"x": x, "residual": residual}, **settings)
        return residual
    columns = weight.num_outputs // 2 if activation and gated else weight.num_outputs
    y = x.graph.value("linear", "act" if activation else out_dtype, columns, x.rows)
    x.graph.add("linear", y, {"x": x}, **settings)
    return y


def _summed(
    x: Handle,
    weight: SlicedWeight,
    bias: FloatArray | None,
    residual: Handle | None,
    adapters: tuple[LoraTable, list[int]] | None,
) -> Handle:
    operands = {"x": x} if residual is None else {"x": x, "residual": residual}
    y = residual
    if y is None:
        y = x.graph.value("summed_linear", "fp32", weight.num_outputs, x.rows)
    added = {} if adapters is None else {"table": adapters[0], "linear_ids": adapters[1]}
    x.graph.add("summed_linear", y, operands, slices=weight, bias=bias, **added)
    return y


def gathered_linear(
    x: Handle,
    weight: LinearWeight | JoinedWeight,
    *,
    bias: FloatArray | None,
    first_column: int,
    num_columns: int,
) -> Handle:
    """Logits fp32 [L, num_columns], of which this rank computes those of ``weight`` from
    ``first_column`` on; rank 0 has those of all ranks from here on, others nothing to read."""
    y = x.graph.value("gathered_linear", "fp32", num_columns, x.rows)
    x.graph.add("gathered_linear", y, {"x": x}, weight=weight, bias=bias, first_column=first_column)
    meet(y)
    return y


def meet(x: Handle) -> None:
    """The end of a step for all ranks but rank 0, which waits for them here and may go on with
    x."""
    x.graph.add("meet", None, {"x": x})


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
    x.graph.add("head_linear", y, {"x": x}, weight=weight, num_heads=num_heads, out_dtype=out_dtype)
    return y


def gated_activation(x: Handle, activation: Activation) -> Handle:
    """act(gate) * up: fp32 [R, 2 n], gate before up -> act [R, n]; for where ``linear`` can't do it
    itself, since something is added to its results first."""
    y = x.graph.value("gated", "act", x.columns // 2, x.rows)
    x.graph.add("gated_activation", y, {"x": x}, activation=activation)
    return y


def activation(x: Handle, activation: Activation) -> Handle:
    """act(x): fp32 [R, n] -> act [R, n], as ``gated_activation``."""
    y = x.graph.value("activated", "act", x.columns, x.rows)
    x.graph.add("activation", y, {"x": x}, activation=activation)
    return y


def soft_cap(x: Handle, cap: float) -> Handle:
    """cap tanh(x / cap), fp32 in place."""
    x.graph.add("soft_cap", x, {"x": x}, cap=cap)
    return x


def clip(x: Handle, cap: float) -> Handle:
    """x between -cap and cap, fp32 in place."""
    x.graph.add("clip", x, {"x": x}, cap=cap)
    return x


def lora_add(x: Handle, y: Handle, table: LoraTable, linear_id: int) -> Handle:
    """y + B A x for the token rows that have an adapter, with that adapter's A and B: act [T, k],
    fp32 [T, n], added to in place and returned. A x is rounded to the act dtype."""
    x.graph.add("lora_add", y, {"x": x, "y": y}, table=table, linear_id=linear_id)
    return y
