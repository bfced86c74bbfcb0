"""A layer's mixture of experts: loading its weights, and recording what it computes."""

from __future__ import annotations

from functools import partial

import numpy as np

from lmi_core import ops
from lmi_core.models.expert_tensors import (
    bias_order,
    down_names,
    expert_parts,
    gate_up_names,
    stacked_bias,
)
from lmi_core.models.spec import DecoderSpec, ExpertSpec
from lmi_core.models.tensor_reader import TensorReader
from lmi_core.models.weights import Experts, LayerWeights, Linear
from lmi_core.ops import Handle


def load_experts(
    reader: TensorReader, spec: DecoderSpec, layer_id: int
) -> tuple[Experts | None, Experts | None]:
    """The layer's experts, and its shared one if its share is scored. Routers stay as they are."""
    experts = spec.experts
    if experts is None or not experts.sparse[layer_id]:
        return None, None
    prefix = spec.names.layer.format(layer=layer_id)
    names = experts.names

    def packed(tensors: list[str], num_parts: int) -> Linear:
        split = partial(expert_parts, experts, num_parts=num_parts, as_blocks=reader.keeps_blocks)
        weight = reader.experts([prefix + name for name in tensors], split, gated=num_parts == 2)
        if not experts.bias:
            return Linear(weight)
        if experts.layout == "stacked":
            biases = [reader.vector(prefix + stacked_bias(name)) for name in tensors]
            return Linear(weight, np.concatenate(biases, axis=1).ravel())
        merged = names.merged_gate_up if num_parts == 2 else names.merged_down
        bias = reader.vector(f"{prefix}{merged}_bias")
        return Linear(weight, bias_order(experts, bias) if num_parts == 2 else bias.ravel())

    routed = Experts(
        router=reader.linear([prefix + names.router], format=reader.weight_format),
        choice_bias=reader.vector(prefix + names.choice_bias) if experts.choice_bias else None,
        gate_up=packed(gate_up_names(experts), 2),
        down=packed(down_names(experts), 1),
    )
    if not experts.gates_shared:
        return routed, None
    shared = Experts(
        router=reader.linear([prefix + names.shared_router], format=reader.weight_format),
        choice_bias=None,
        gate_up=reader.linear([prefix + names.shared_gate, prefix + names.shared_up], gated=True),
        down=reader.linear([prefix + names.shared_down]),
    )
    return routed, shared


def add_experts(x: Handle, h: Handle, layer: LayerWeights, spec: DecoderSpec) -> Handle:
    """x + what the layer's experts make of h, and its shared one if its share is scored."""
    experts = spec.experts
    assert experts is not None
    assert layer.experts is not None
    logits = _scored(h, layer.experts)
    routes = ops.route(
        logits,
        top_k=experts.top_k,
        scoring=experts.scoring,
        bias=layer.experts.choice_bias,
        num_groups=experts.num_groups,
        top_groups=experts.top_groups,
        group_best=experts.group_best,
        normalizes=experts.normalizes,
        scale=experts.scale,
        threshold=experts.threshold,
    )
    x = _combined(x, h, routes, layer.experts, spec, experts)
    if layer.shared_expert is None:
        return x
    share = ops.route(_scored(h, layer.shared_expert), top_k=1, scoring="sigmoid")
    return _combined(x, h, share, layer.shared_expert, spec, experts)


def _scored(h: Handle, mixture: Experts) -> Handle:
    return ops.linear(h, mixture.router.weight, bias=mixture.router.bias)


def _combined(
    x: Handle,
    h: Handle,
    routes: Handle,
    mixture: Experts,
    spec: DecoderSpec,
    experts: ExpertSpec,
) -> Handle:
    gate_up, down = mixture.gate_up, mixture.down
    activation = experts.activation or spec.activation
    h = ops.grouped_linear(h, routes, gate_up.weight, bias=gate_up.bias, activation=activation)
    return ops.grouped_linear(h, routes, down.weight, bias=down.bias, residual=x)
