"""The decoder's linears that adapters add to, and the modules of a checkpoint that they fuse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from lmi_core.models.linears import LayerLinear, RowIds, layer_linears
from lmi_core.models.spec import DecoderSpec


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
    rows: RowIds | None
    """The module's output for each of ours; None: as they are."""


def linear_id(layer_id: int, linear: LayerLinear) -> int:
    return layer_id * len(LayerLinear) + linear


def linear_shapes(spec: DecoderSpec) -> list[LinearShape]:
    """By linear id; (0, 0) where a layer has no such linear."""
    shapes = []
    for layer_id in range(spec.num_layers):
        sources = layer_linears(spec, layer_id)
        for linear in LayerLinear:
            source = sources.get(linear)
            none = LinearShape(0, 0)
            shapes.append(LinearShape(source.num_inputs, source.num_outputs) if source else none)
    return shapes


def lora_modules(spec: DecoderSpec) -> dict[str, LoraModule]:
    """By their names in the checkpoint."""
    return {module.name: module for module in _modules(spec)}


def _modules(spec: DecoderSpec) -> Iterator[LoraModule]:
    for layer_id in range(spec.num_layers):
        prefix = spec.names.layer.format(layer=layer_id)
        for linear, source in layer_linears(spec, layer_id).items():
            first, number = 0, linear_id(layer_id, linear)
            for name, size in source.modules:
                shape = LinearShape(source.num_inputs, size)
                rows = source.module_rows(first, size)
                yield LoraModule(prefix + name, number, first, shape, rows)
                first += size
