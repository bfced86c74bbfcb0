"""Experts of common tensors as if each had tensors of its own: slices of the checkpoint's files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from lmi_core.models.expert_tensors import (
    bias_beside,
    down_names,
    expert_mlps,
    gate_up_names,
    published_apart,
)
from lmi_core.models.found_model import FoundModel
from lmi_core.models.spec import ExpertSpec
from lmi_core.models.tensor_check import expected_shapes
from lmi_core.weights.safetensors_file import TensorInfo, Turned

COMMON = ("merged", "interleaved", "stacked_rows")
"""Layouts that can be sliced."""
_INVENTED = {part: f"experts.{{expert}}.{part}" for part in ("gate", "up", "down")}
"""Names where a family has none, for as long as it takes: GGUF's files don't have them."""


def own_form(experts: ExpertSpec, *, is_gguf: bool) -> ExpertSpec | None:
    """The same experts with linears of each; None: files of such models have no such form. GGUF
    puts them together again."""
    names, layout = experts.names, experts.layout
    if is_gguf or (layout == "merged" and names.gate):
        named = names if names.gate and layout == "merged" else replace(names, **_INVENTED)
        return replace(experts, layout="each", names=named)
    apart = published_apart(names) if layout == "interleaved" else None
    return None if apart is None else replace(experts, layout="each_in_turns", names=apart)


def with_own_tensors(found: FoundModel, *, is_gguf: bool) -> FoundModel:
    """``found`` with linears of each expert, where they are in common tensors of floats."""
    experts = found.spec.experts
    if experts is None or not any(experts.sparse) or experts.layout not in COMMON:
        return found
    own = own_form(experts, is_gguf=is_gguf)
    assert own is not None
    spec = replace(found.spec, experts=own)
    tensors = dict(found.tensors)
    for layer_id in (i for i, is_sparse in enumerate(experts.sparse) if is_sparse):
        prefix = spec.names.layer.format(layer=layer_id)
        sliced = dict(_slices(experts, own, tensors, prefix))
        for common in (*gate_up_names(experts), *down_names(experts)):
            tensors.pop(prefix + common)
            tensors.pop(f"{prefix}{common}_bias", None)
        for end in ("weight", "bias"):
            router = tensors.pop(f"{prefix}{experts.names.router}.{end}", None)
            if router is not None:
                name = f"{prefix}{own.names.router}.{end}"
                sliced[name] = replace(router, name=name)
        tensors |= sliced
    return replace(found, spec=spec, tensors=tensors, shapes=expected_shapes(spec))


def _slices(
    experts: ExpertSpec, own: ExpertSpec, tensors: Mapping[str, TensorInfo], prefix: str
) -> Iterator[tuple[str, TensorInfo]]:
    """By name, those of a layer, in the form of ``own``."""
    count, inner = experts.num_experts, experts.intermediate_size
    gate_up = [tensors[prefix + name] for name in gate_up_names(experts)]
    (down,) = (tensors[prefix + name] for name in down_names(experts))
    hidden = gate_up[0].shape[1 if experts.layout == "interleaved" else -1]
    turns = 2 if own.layout == "each" else 1
    for expert, (*parts, last) in enumerate(expert_mlps(own)[:count]):
        for i, name in enumerate(prefix + part for part in parts):
            shape = (2 * inner // len(parts), hidden)
            if experts.layout == "merged":
                yield name, _slice(gate_up[0], name, 2 * expert + i, 2 * count, shape)
            elif experts.layout == "stacked_rows":
                yield name, _slice(gate_up[i], name, expert, count, shape)
            else:
                turned = Turned((hidden, 2 * inner), i, turns)
                yield name, _slice(gate_up[0], name, expert, count, shape, turned)
            if experts.bias:
                bias, named = tensors[f"{gate_up[0].name}_bias"], bias_beside(name)
                turned = Turned((2 * inner,), i, turns)
                yield named, _slice(bias, named, expert, count, shape[:1], turned)
        name = prefix + last
        of_down = None if experts.layout == "merged" else Turned((inner, hidden))
        yield name, _slice(down, name, expert, count, (hidden, inner), of_down)
        if experts.bias:
            bias, named = tensors[f"{down.name}_bias"], bias_beside(name)
            yield named, _slice(bias, named, expert, count, (hidden,))


def _slice(
    tensor: TensorInfo,
    name: str,
    part: int,
    num_parts: int,
    shape: tuple[int, ...],
    turned: Turned | None = None,
) -> TensorInfo:
    """One of so many neighbouring parts of what is stored."""
    num_bytes = tensor.num_bytes // num_parts
    return replace(
        tensor,
        name=name,
        shape=shape,
        offset=tensor.offset + part * num_bytes,
        num_bytes=num_bytes,
        turned=turned,
    )
