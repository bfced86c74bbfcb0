"""The decoder's linears that adapters add to, and the modules of a checkpoint that they fuse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from lmi_core.models.family import WeightNames
from lmi_core.models.spec import DecoderSpec


class LayerLinear(IntEnum):
    """The linears of a layer, in order."""

    QKV = 0
    ATTENTION_OUTPUT = 1
    GATE_UP = 2
    DOWN = 3


class LinearShape(NamedTuple):
    num_inputs: int
    num_outputs: int


@dataclass(frozen=True, slots=True)
class LoraModule:
    """A module of the checkpoint: the outputs from ``first_output`` on of one of our linears."""

    name: str
    linear_id: int
    first_output: int
    shape: LinearShape


def linear_id(layer_id: int, linear: LayerLinear) -> int:
    return layer_id * len(LayerLinear) + linear


def linear_shapes(spec: DecoderSpec) -> list[LinearShape]:
    """By linear id."""
    attention, hidden, inner = spec.attention, spec.hidden_size, spec.intermediate_size
    layer = [
        LinearShape(hidden, attention.q_size + 2 * attention.kv_size),
        LinearShape(attention.q_size, hidden),
        LinearShape(hidden, 2 * inner),
        LinearShape(inner, hidden),
    ]
    return layer * spec.num_layers


def lora_modules(spec: DecoderSpec, names: WeightNames) -> dict[str, LoraModule]:
    """By their names in the checkpoint."""
    return {module.name: module for module in _modules(spec, names)}


def _modules(spec: DecoderSpec, names: WeightNames) -> Iterator[LoraModule]:
    q_size, kv_size = spec.attention.q_size, spec.attention.kv_size
    hidden, inner = spec.hidden_size, spec.intermediate_size
    fused = {
        LayerLinear.QKV: ((names.q, q_size), (names.k, kv_size), (names.v, kv_size)),
        LayerLinear.ATTENTION_OUTPUT: ((names.attention_output, hidden),),
        LayerLinear.GATE_UP: ((names.gate, inner), (names.up, inner)),
        LayerLinear.DOWN: ((names.down, hidden),),
    }
    shapes = linear_shapes(spec)
    for layer_id in range(spec.num_layers):
        prefix = names.layer.format(layer=layer_id)
        for linear, parts in fused.items():
            first_output, number = 0, linear_id(layer_id, linear)
            for name, num_outputs in parts:
                shape = LinearShape(shapes[number].num_inputs, num_outputs)
                yield LoraModule(prefix + name, number, first_output, shape)
                first_output += num_outputs
