"""What ranks do together that have a slice of a model each, beside sums of sliced weights."""

from __future__ import annotations

from lmi_core.ops.graph import Handle
from lmi_core.ops.operands import JoinedWeight, LinearWeight
from lmi_core.weights.formats import FloatArray


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
    return qkv.graph.add(
        "norm_all_heads",
        qkv,
        {"qkv": qkv},
        q_weight=q_weight,
        k_weight=k_weight,
        eps=eps,
        head_dim=head_dim,
        num_alike=num_alike,
    )


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
