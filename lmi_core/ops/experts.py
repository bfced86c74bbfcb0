"""A mixture of experts: routing, and products with each row's own experts' matrices.

Router logits are fp32 and ties go to the lowest id. Outputs of experts are summed in fp32 in
ascending order of ids, so a row's result depends on nothing but the row.
"""

from __future__ import annotations

from typing import Literal

from lmi_core.ops.graph import Activation, Handle
from lmi_core.ops.operands import LinearWeight, SlicedWeight
from lmi_core.weights.formats import FloatArray

Scoring = Literal["softmax", "sigmoid", "sparsemixer"]


def route(
    logits: Handle,
    *,
    top_k: int,
    scoring: Scoring,
    bias: FloatArray | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    group_best: int = 1,
    normalizes: bool = False,
    scale: float = 1.0,
    threshold: float = 0.0,
) -> Handle:
    """The best ``top_k`` experts of each row and their weights: fp32 [T, experts] -> fp32 [T, 2
    top_k], ids in ascending order, then weights.

    ``scoring``: softmax over all experts, sigmoids, or SparseMixer's (arXiv 2310.00811), which
    scores each choice among the logits within ``threshold``, relatively, of the greatest left.
    ``bias``: added to scores for the choice alone. ``num_groups``: of experts, of which only the
    best ``top_groups`` are chosen from, by the sum of their ``group_best`` (1 or 2) best scores
    (DeepSeek-V2, arXiv 2405.04434, and V3, arXiv 2412.19437). ``normalizes``: weights sum to 1,
    before they are multiplied by ``scale``."""
    if not 0 < top_k <= logits.columns:
        raise ValueError(f"the best {top_k} of {logits.columns} experts")
    y = logits.graph.value("route", "fp32", 2 * top_k, logits.rows)
    return logits.graph.add(
        "route",
        y,
        {"x": logits},
        top_k=top_k,
        scoring=scoring,
        bias=bias,
        num_groups=num_groups,
        top_groups=top_groups,
        group_best=group_best,
        normalizes=normalizes,
        scale=scale,
        threshold=threshold,
    )


def grouped_linear(
    x: Handle,
    routes: Handle,
    weight: LinearWeight | SlicedWeight,
    *,
    bias: FloatArray | None = None,
    activation: Activation | Literal[""] = "",
    residual: Handle | None = None,
) -> Handle:
    """Each row times the matrices of its experts: act [T, k], or [E, k] as this gave it -> act [E,
    n], where E has a row for each expert of each row, by ascending expert.

    ``weight``: of all experts; ``bias`` [experts n]. ``activation``: ``weight`` holds gate and up.
    ``residual``: fp32 [T, n], to which experts' outputs times their weights are added in place, in
    ascending order of experts; returned. A sliced weight's sums go over the slices of all ranks,
    of which one has the bias."""
    if x.columns != weight.num_inputs:
        raise ValueError(f"experts with {weight.num_inputs} inputs got {x.name}, {x.columns} wide")
    operands = {"x": x, "routes": routes}
    if isinstance(weight, SlicedWeight):
        assert residual is not None
        operands["residual"] = residual
        return x.graph.add("summed_experts", residual, operands, slices=weight, bias=bias)
    settings = {"weight": weight, "bias": bias, "activation": activation}
    if residual is not None:
        operands["residual"] = residual
        return x.graph.add("grouped_linear", residual, operands, **settings)
    columns = weight.num_outputs // 2 if activation else weight.num_outputs
    y = x.graph.value("grouped_linear", "act", columns, "E")
    return x.graph.add("grouped_linear", y, operands, **settings)
