"""Matrix products with a weight, and what is fused with them."""

from __future__ import annotations

from typing import Literal

from lmi_core.ops.recorder import Activation, Handle, LinearWeight, LoraTable
from lmi_core.weights.formats import FloatArray


def linear(
    x: Handle,
    weight: LinearWeight,
    *,
    bias: FloatArray | None = None,
    activation: Activation | Literal[""] = "",
    gated: bool = True,
    residual: Handle | None = None,
    out_dtype: Literal["fp32", "act"] = "fp32",
) -> Handle:
    """x @ weight^T + bias: act [R, k] -> [R, n], accumulated in fp32.

    ``activation``: ``weight`` holds gate and up, the result is act(gate) * up, act [R, n / 2]; not
    ``gated``, act(y), act [R, n].
    ``residual``: fp32 [R, n], added to in place and returned.
    """
    if x.columns != weight.num_inputs:
        raise ValueError(f"linear over {weight.num_inputs} inputs got {x.name}, {x.columns} wide")
    if bias is not None and bias.shape != (weight.num_outputs,):
        raise ValueError(f"linear to {weight.num_outputs} outputs got a bias of {bias.shape}")
    return x.recorder.linear(
        x,
        weight,
        bias=bias,
        activation=activation,
        gated=gated,
        residual=residual,
        out_dtype=out_dtype,
    )


def activation(x: Handle, activation: Activation, *, gated: bool = True) -> Handle:
    """act(gate) * up: fp32 [R, 2 n], gate before up -> act [R, n], or act(x) -> act [R, n]; for
    where ``linear`` can't do it itself, since something is added to its results first."""
    return x.recorder.activation(x, activation, gated=gated)


def soft_cap(x: Handle, cap: float) -> Handle:
    """cap tanh(x / cap), fp32 in place."""
    return x.recorder.soft_cap(x, cap)


def lora_add(x: Handle, y: Handle, table: LoraTable, linear_id: int) -> Handle:
    """y + B A x for the token rows that have an adapter, with that adapter's A and B: act [T, k],
    fp32 [T, n], added to in place and returned. A x is rounded to the act dtype."""
    return x.recorder.lora_add(x, y, table, linear_id)
