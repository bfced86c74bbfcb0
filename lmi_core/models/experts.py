"""A layer's mixture of experts: loading its weights, and recording what it computes."""

from __future__ import annotations

from functools import partial

import numpy as np

from lmi_core import ops
from lmi_core.models.expert_tensors import (
    EACH,
    bias_beside,
    bias_order,
    down_names,
    expert_parts,
    gate_up_names,
)
from lmi_core.models.slices import WHOLE, Slicing
from lmi_core.models.spec import DecoderSpec, ExpertSpec
from lmi_core.models.tensor_reader import TensorReader
from lmi_core.models.weights import Experts, LayerWeights, Linear
from lmi_core.ops import Handle


def load_experts(
    reader: TensorReader, spec: DecoderSpec, experts: ExpertSpec, layer_id: int, slicing: Slicing
) -> tuple[Experts, Experts | None]:
    """The layer's experts, and its shared one if its share is scored. Routers stay as they are."""
    prefix = spec.names.layer.format(layer=layer_id)
    names = experts.names

    slices = slicing.own(slicing.inner(experts.intermediate_size))
    own = slice(slices[0][0], slices[-1][1])
    rows = None if slicing.num_ranks == 1 else own

    def gate_up() -> Linear:
        split = partial(expert_parts, experts, num_parts=2, as_blocks=reader.packing.keeps_blocks)
        tensors = [prefix + name for name in gate_up_names(experts)]
        weight = reader.experts(tensors, split, gated=True, rows=rows)
        if not experts.bias:
            return Linear(weight)
        if experts.layout == "stacked":
            bias = np.concatenate([reader.vector(bias_beside(name)) for name in tensors], axis=1)
        elif experts.layout in EACH:
            each = [reader.vector(bias_beside(name)) for name in tensors]
            bias = bias_order(experts, np.concatenate(each))
        else:
            bias = bias_order(experts, reader.vector(f"{prefix}{names.merged_gate_up}_bias"))
        bias = bias.reshape(experts.num_experts, 2, -1)[:, :, own]
        return Linear(weight, np.ascontiguousarray(bias).ravel())

    def down() -> Linear:
        split = partial(expert_parts, experts, num_parts=1, as_blocks=reader.packing.keeps_blocks)
        tensors = [prefix + name for name in down_names(experts)]
        inputs = None if slicing == WHOLE else slices
        weight = reader.experts(tensors, split, gated=False, inputs=inputs)
        if not experts.bias:
            return Linear(weight)
        biases = [f"{prefix}{names.merged_down}_bias"]
        if experts.layout in ("stacked", *EACH):
            biases = [bias_beside(name) for name in tensors]
        read = [reader.vector(name).ravel() for name in biases]
        return Linear(weight, np.concatenate(read) if slicing.rank == 0 else None)

    routed = Experts(
        router=reader.linear([prefix + names.router], format=reader.packing.weight_format),
        choice_bias=reader.vector(prefix + names.choice_bias) if experts.choice_bias else None,
        gate_up=gate_up(),
        down=down(),
    )
    return routed, _load_shared(reader, experts, prefix, slicing) if experts.gates_shared else None


def _load_shared(
    reader: TensorReader, experts: ExpertSpec, prefix: str, slicing: Slicing
) -> Experts:
    """The one that every token takes, by a share that is scored."""
    names, inner = experts.names, experts.shared_size
    return Experts(
        router=reader.linear([prefix + names.shared_router], format=reader.packing.weight_format),
        choice_bias=None,
        gate_up=reader.linear(
            [prefix + names.shared_gate, prefix + names.shared_up],
            gated=True,
            rows=None if slicing.num_ranks == 1 else slicing.inner_rows(inner, 2),
        ),
        down=reader.linear(
            [prefix + names.shared_down],
            inputs=None if slicing == WHOLE else slicing.own(slicing.inner(inner)),
        ),
    )


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
