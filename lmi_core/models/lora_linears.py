"""The decoder's linears that adapters add to, and the modules of a checkpoint that they fuse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from lmi_core.models.slices import WHOLE, Slicing
from lmi_core.models.spec import DecoderSpec, LayerLinear, RowIds, layer_linears


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


@dataclass(frozen=True, slots=True)
class OwnLinear:
    """What a rank has of a linear that adapters add to, or a slice of that; its id is the rank's,
    ``whole_id`` the model's."""

    linear_id: int
    whole_id: int
    shape: LinearShape
    rows: RowIds | None = None
    """Of the outputs, in our order; None: all of them."""
    inputs: tuple[int, int] | None = None
    """From the first up to this one; None: all of them."""


def linear_id(
    layer_id: int, linear: LayerLinear, slicing: Slicing = WHOLE, slice_id: int = 0
) -> int:
    """``slice_id``: of the rank's own slices of inputs; of outputs there is one."""
    return (layer_id * slicing.num_own + slice_id) * len(LayerLinear) + linear


def linear_shapes(spec: DecoderSpec, slicing: Slicing = WHOLE) -> list[LinearShape]:
    """By linear id; (0, 0) where a layer has no such linear. ``spec``: of the whole model."""
    num_linears = spec.num_layers * slicing.num_own * len(LayerLinear)
    shapes = [LinearShape(0, 0)] * num_linears
    for own in own_linears(spec, slicing):
        shapes[own.linear_id] = own.shape
    return shapes


def own_linears(spec: DecoderSpec, slicing: Slicing) -> Iterator[OwnLinear]:
    """What a rank of the model of ``spec`` has."""
    for layer_id in range(spec.num_layers):
        for linear, (source, rows, bounds) in slicing.linears(
            spec, layer_linears(spec, layer_id)
        ).items():
            whole_id = linear_id(layer_id, linear)
            if bounds is None:
                num_outputs = source.num_outputs if rows is None else len(rows)
                shape = LinearShape(source.num_inputs, num_outputs)
                yield OwnLinear(linear_id(layer_id, linear, slicing), whole_id, shape, rows)
            for slice_id, (first, end) in enumerate(bounds or ()):
                number = linear_id(layer_id, linear, slicing, slice_id)
                shape = LinearShape(end - first, source.num_outputs)
                yield OwnLinear(number, whole_id, shape, inputs=(first, end))


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
