"""The tensors that a checkpoint holds a mixture of experts in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lmi_core.models.spec import DecoderSpec, ExpertSpec
from lmi_core.weights.matrix import Matrix, dense
from lmi_core.weights.safetensors_file import TensorInfo


def expert_shapes(experts: ExpertSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    """Of a layer's tensors, but for those of a shared expert that is an MLP."""
    names, count, inner = experts.names, experts.num_experts, experts.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {f"{names.router}.weight": (count, hidden)}
    if experts.router_bias:
        shapes[f"{names.router}.bias"] = (count,)
    if experts.choice_bias:
        shapes[names.choice_bias] = (count,)
    if experts.layout == "merged":
        shapes[names.merged_gate_up] = (count, 2 * inner, hidden)
        shapes[names.merged_down] = (count, hidden, inner)
    else:
        for name in gate_up_names(experts):
            shapes[name] = (inner, hidden)
        for name in down_names(experts):
            shapes[name] = (hidden, inner)
    if experts.gates_shared:
        size = experts.shared_size
        shapes[f"{names.shared_router}.weight"] = (1, hidden)
        shapes[f"{names.shared_gate}.weight"] = shapes[f"{names.shared_up}.weight"] = (size, hidden)
        shapes[f"{names.shared_down}.weight"] = (hidden, size)
    return shapes


def gate_up_names(experts: ExpertSpec) -> list[str]:
    """Of the tensors with gates and ups."""
    names = experts.names
    if experts.layout == "merged":
        return [names.merged_gate_up]
    return [
        f"{name.format(expert=expert)}.weight"
        for expert in range(experts.num_experts)
        for name in (names.gate, names.up)
    ]


def down_names(experts: ExpertSpec) -> list[str]:
    names = experts.names
    if experts.layout == "merged":
        return [names.merged_down]
    return [f"{names.down.format(expert=i)}.weight" for i in range(experts.num_experts)]


def expert_parts(experts: ExpertSpec, matrices: list[Matrix], num_parts: int) -> list[list[Matrix]]:
    """Each expert's parts of ``gate_up_names``' or ``down_names``' tensors."""
    if experts.layout == "merged":
        return [[matrix] for matrix in dense(matrices)[0]]
    return [matrices[i : i + num_parts] for i in range(0, len(matrices), num_parts)]


def with_layout(spec: DecoderSpec, tensors: Mapping[str, TensorInfo]) -> DecoderSpec:
    """``spec`` with the layout that a checkpoint's experts have."""
    experts = spec.experts
    if experts is None or True not in experts.sparse:
        return spec
    prefix = spec.names.layer.format(layer=experts.sparse.index(True))
    if prefix + experts.names.merged_gate_up not in tensors:
        return spec
    return replace(spec, experts=replace(experts, layout="merged"))


def idle_params(experts: ExpertSpec, hidden: int) -> int:
    """Weights of the experts that a row doesn't take, of all layers."""
    num_idle = sum(experts.sparse) * (experts.num_experts - experts.top_k)
    return num_idle * 3 * hidden * experts.intermediate_size
