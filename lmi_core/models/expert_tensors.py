"""The tensors that a checkpoint holds a mixture of experts in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from lmi_core.models.spec import DecoderSpec, ExpertSpec
from lmi_core.models.weight_names import ExpertLayout, ExpertNames
from lmi_core.weights.formats import FloatArray
from lmi_core.weights.fp8_checkpoint import FP8_ENDINGS
from lmi_core.weights.matrix import Matrix, dense, rows_of
from lmi_core.weights.mxfp4 import MXFP4_BLOCK, decode_mxfp4, mxfp4_matrix
from lmi_core.weights.safetensors_file import TensorInfo

STACKED: tuple[ExpertLayout, ...] = ("stacked", "stacked_rows")
"""Whose tensors ``ExpertNames`` names in whole."""
EACH: tuple[ExpertLayout, ...] = ("each", "each_in_turns")
"""Of which every expert has linears of its own."""
_PUBLISHED_APART = {
    "mlp.experts.gate_up_proj": {
        "router": "mlp.router.linear",
        "gate": "mlp.experts.gate_up_projs.{expert}",
        "down": "mlp.experts.down_projs.{expert}",
    }
}
"""By what common tensors are called: what Unsloth and GPTQModel call linears of each expert."""


def expert_shapes(experts: ExpertSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    """Of a layer's tensors, but for those of a shared expert that is an MLP."""
    names, count, inner = experts.names, experts.num_experts, experts.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {f"{names.router}.weight": (count, hidden)}
    if experts.router_bias:
        shapes[f"{names.router}.bias"] = (count,)
    if experts.choice_bias:
        shapes[names.choice_bias] = (count,)
    if experts.layout == "stacked":
        shapes |= dict.fromkeys(gate_up_names(experts), (count, inner, hidden))
        shapes |= dict.fromkeys(down_names(experts), (count, hidden, inner))
        if experts.bias:
            shapes |= {bias_beside(name): shapes[name][:2] for name in gate_up_names(experts)}
            shapes |= {bias_beside(name): shapes[name][:2] for name in down_names(experts)}
    elif experts.layout == "stacked_rows":
        all_names = [*gate_up_names(experts), *down_names(experts)]
        shapes |= dict.fromkeys(all_names, (count * inner, hidden))
    elif experts.layout not in EACH:
        shapes |= _merged_shapes(names.merged_gate_up, experts, 2 * inner, hidden)
        shapes |= _merged_shapes(names.merged_down, experts, hidden, inner)
    else:
        num_outputs = inner if experts.layout == "each" else 2 * inner
        own = dict.fromkeys(gate_up_names(experts), (num_outputs, hidden))
        own |= dict.fromkeys(down_names(experts), (hidden, inner))
        shapes |= own
        if experts.bias:
            shapes |= {bias_beside(name): shape[:1] for name, shape in own.items()}
    if experts.gates_shared:
        size = experts.shared_size
        shapes[f"{names.shared_router}.weight"] = (1, hidden)
        shapes[f"{names.shared_gate}.weight"] = shapes[f"{names.shared_up}.weight"] = (size, hidden)
        shapes[f"{names.shared_down}.weight"] = (hidden, size)
    return shapes


def _merged_shapes(
    name: str, experts: ExpertSpec, num_outputs: int, num_inputs: int
) -> dict[str, tuple[int, ...]]:
    count = experts.num_experts
    shapes: dict[str, tuple[int, ...]] = {}
    if experts.layout == "mxfp4":
        num_blocks = -(-num_inputs // MXFP4_BLOCK)
        shapes[f"{name}_blocks"] = (count, num_outputs, num_blocks, MXFP4_BLOCK // 2)
        shapes[f"{name}_scales"] = (count, num_outputs, num_blocks)
    elif experts.layout == "interleaved":
        shapes[name] = (count, num_inputs, num_outputs)
    else:
        shapes[name] = (count, num_outputs, num_inputs)
    return shapes | ({f"{name}_bias": (count, num_outputs)} if experts.bias else {})


def gate_up_names(experts: ExpertSpec) -> list[str]:
    """Of the tensors with gates and ups."""
    names = experts.names
    if experts.layout in STACKED:
        return [names.gate, names.up]
    if experts.layout not in EACH:
        return _merged_names(names.merged_gate_up, experts)
    parts = (names.gate, names.up) if experts.layout == "each" else (names.gate,)
    return [
        f"{name.format(expert=expert)}.weight"
        for expert in range(experts.num_experts)
        for name in parts
    ]


def down_names(experts: ExpertSpec) -> list[str]:
    names = experts.names
    if experts.layout in STACKED:
        return [names.down]
    if experts.layout not in EACH:
        return _merged_names(names.merged_down, experts)
    return [f"{names.down.format(expert=i)}.weight" for i in range(experts.num_experts)]


def expert_mlps(experts: ExpertSpec) -> list[tuple[str, ...]]:
    """Names of gate, up and down of each expert that has tensors of its own, or of gate and up in
    turns and down, and of the shared one if its share is scored."""
    names = experts.names
    ups = (names.up,) if experts.layout == "each" else ()
    own = (names.gate, *ups, names.down)
    mlps = [tuple(name.format(expert=i) for name in own) for i in range(experts.num_experts)]
    if experts.gates_shared:
        mlps.append((names.shared_gate, names.shared_up, names.shared_down))
    return [tuple(f"{name}.weight" for name in mlp) for mlp in mlps]


def router_modules(spec: DecoderSpec) -> list[str]:
    """Names of the modules that score experts, of all layers."""
    experts = spec.experts
    if experts is None:
        return []
    names = [experts.names.router]
    if experts.gates_shared:
        names.append(experts.names.shared_router)
    prefixes = [
        spec.names.layer.format(layer=layer_id)
        for layer_id, is_sparse in enumerate(experts.sparse)
        if is_sparse
    ]
    return [prefix + name for prefix in prefixes for name in names]


def _merged_names(name: str, experts: ExpertSpec) -> list[str]:
    return [f"{name}_blocks", f"{name}_scales"] if experts.layout == "mxfp4" else [name]


def expert_parts(
    experts: ExpertSpec, matrices: list[Matrix], num_parts: int, *, as_blocks: bool
) -> list[list[Matrix]]:
    """Each expert's parts of ``gate_up_names``' or ``down_names``' tensors. ``as_blocks``: MXFP4
    stays as it is."""
    if experts.layout in (*STACKED, "merged"):
        return _stacked_parts(experts, matrices, num_parts)
    if experts.layout == "each":
        return [matrices[i : i + num_parts] for i in range(0, len(matrices), num_parts)]
    whole: Iterable[Matrix] = matrices
    if experts.layout == "interleaved":
        whole = (matrix.T for matrix in dense(matrices)[0])
    elif experts.layout == "mxfp4":
        decode = mxfp4_matrix if as_blocks else decode_mxfp4
        whole = (decode(*expert) for expert in zip(*dense(matrices), strict=True))
    return [[_every(matrix, i, num_parts) for i in range(num_parts)] for matrix in whole]


def _every(matrix: Matrix, first: int, step: int) -> Matrix:
    return rows_of(matrix, np.arange(first, len(matrix), step))


def bias_beside(name: str) -> str:
    """Of a linear, or of a stacked tensor, [experts, outputs]."""
    return f"{name.removesuffix('weight')}bias"


def _stacked_parts(
    experts: ExpertSpec, matrices: list[Matrix], num_parts: int
) -> list[list[Matrix]]:
    """``matrices``: with the rows of all experts, one after the other."""
    parts = []
    matrices = [
        matrix.reshape(-1, matrix.shape[-1]) if isinstance(matrix, np.ndarray) else matrix
        for matrix in matrices
    ]
    for expert in range(experts.num_experts):
        sizes = [len(matrix) // experts.num_experts for matrix in matrices]
        own = [
            rows_of(matrix, slice(expert * size, (expert + 1) * size))
            for matrix, size in zip(matrices, sizes, strict=True)
        ]
        if experts.layout == "stacked_rows" and num_parts == 1:
            own = [np.ascontiguousarray(matrix.T) for matrix in dense(own)]
        parts.append(own)
    return parts


def published_apart(names: ExpertNames) -> ExpertNames | None:
    """What linears of each expert are called where such common tensors were taken apart, gate and
    up in turns; None: nobody does."""
    apart = _PUBLISHED_APART.get(names.merged_gate_up)
    return None if apart is None else replace(names, **apart)


def with_layout(spec: DecoderSpec, tensors: Mapping[str, TensorInfo]) -> DecoderSpec:
    """``spec`` with the layout that a checkpoint's experts have."""
    experts = spec.experts
    if experts is None or True not in experts.sparse:
        return spec
    prefix = spec.names.layer.format(layer=experts.sparse.index(True))
    merged, names = prefix + experts.names.merged_gate_up, experts.names
    layout = experts.layout
    if merged in tensors and layout == "each":
        layout = "merged"
    elif f"{merged}_blocks" in tensors:
        layout = "mxfp4"
    elif layout == "interleaved" and any(name.startswith(f"{merged}s.0.") for name in tensors):
        layout, names = "each_in_turns", published_apart(names) or names
    return replace(spec, experts=replace(experts, layout=layout, names=names))


def unread_experts(
    spec: DecoderSpec, shapes: Mapping[str, object], tensors: Mapping[str, TensorInfo]
) -> str | None:
    """The first of ``tensors`` that stands for a layer's experts together in a format that there
    are no products of; None: there is none. ``shapes``: by the names that are read."""
    if spec.experts is None or True not in spec.experts.sparse:
        return None
    prefix = spec.names.layer.format(layer=spec.experts.sparse.index(True))
    parts = (spec.experts.names.merged_gate_up, spec.experts.names.merged_down)
    merged = tuple(prefix + part.removesuffix(".weight") + end for part in parts for end in "._")
    coded = (name for name in tensors if name.startswith(merged) and name not in shapes)
    return next((name for name in coded if not name.endswith(FP8_ENDINGS)), None)


def is_router(spec: DecoderSpec, name: str) -> bool:
    """Whether a tensor scores experts."""
    if spec.experts is None:
        return False
    names = spec.experts.names
    return any(part and f".{part}." in name for part in (names.router, names.shared_router))


def idle_params(experts: ExpertSpec, hidden: int) -> int:
    """Weights of the experts that a row doesn't take, of all layers."""
    num_idle = sum(experts.sparse) * (experts.num_experts - experts.top_k)
    return num_idle * 3 * hidden * experts.intermediate_size


def bias_order(experts: ExpertSpec, bias: FloatArray) -> FloatArray:
    """Of gates, then ups, of every expert, from biases [experts, 2 inner] in turns."""
    return np.ascontiguousarray(bias.reshape(experts.num_experts, -1, 2).swapaxes(1, 2)).ravel()
