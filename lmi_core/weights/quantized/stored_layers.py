"""The linear layers of one checkpoint that are stored in integers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lmi_core.weights.float_tensors import read_array, to_float32
from lmi_core.weights.formats import FloatArray, RowRounding
from lmi_core.weights.integer_matrix import IntegerMatrix
from lmi_core.weights.quantized.layout import (
    LayerTensors,
    Layout,
    Part,
    Shape,
    StoredMatrix,
    kept_as,
)
from lmi_core.weights.safetensors_file import TensorInfo

_WEIGHT = ".weight"
_FLOATS = ("F", "BF")
"""How the names of float dtypes begin."""


@dataclass(frozen=True, slots=True)
class _Layer:
    name: str
    shape: Shape
    layout: Layout
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, layout: Layout, weight: str, shape: Shape) -> _Layer:
        name = weight.removesuffix(_WEIGHT)
        return cls(name, shape, layout, layout.parts(name, shape))


class Kept(NamedTuple):
    """What a layer's weight is held in."""

    format: str | None
    """None: floats."""
    rounding: RowRounding | None
    """Of the rows that it is multiplied with, by its scheme; None: that says nothing."""


class StoredLayers(dict[str, _Layer]):
    """Those among the matrices ``shapes``, by their names in 16 bits, that the checkpoint has as
    ``layout`` says: its tensors tell which. None: none of them."""

    def __init__(
        self,
        layout: Layout | None,
        shapes: Mapping[str, tuple[int, ...]],
        tensors: Mapping[str, TensorInfo],
    ) -> None:
        self._tensors = tensors
        for name, shape in shapes.items():
            is_matrix = name.endswith(_WEIGHT) and len(shape) == 2
            if layout is not None and is_matrix and _is_marked(layout, name, tensors):
                self[name] = _Layer.of(layout, name, (shape[0], shape[1]))
        biases = {f"{layer.name}.bias" for layer in self.values()}
        self.spare_biases = biases & (tensors.keys() - shapes.keys())
        """Of layers that have none: some tools write zeros."""
        self.ignored = {
            f"{layer.name}.{suffix}" for layer in self.values() for suffix in layer.layout.ignored
        }
        """Names of tensors that may be there, and aren't read."""

    def problems(self, weight: str) -> list[str]:
        """What is wrong with the tensors that stand for ``weight``."""
        layer = self[weight]
        problems = (
            part.problem(layer.name, self._tensors.get(f"{layer.name}.{part.suffix}"))
            for part in layer.parts
        )
        return [problem for problem in problems if problem]

    def tensors_of(self, weight: str) -> dict[str, TensorInfo]:
        """The tensors that stand for ``weight``."""
        layer = self[weight]
        names = (f"{layer.name}.{part.suffix}" for part in layer.parts)
        return {name: self._tensors[name] for name in names if name in self._tensors}

    def check(self) -> None:
        """Raise ModelError for the first layer that can't be kept; its codes aren't read."""
        for _ in self._judged():
            pass

    def kept(self, *, keeps_blocks: bool, keeps_orders: bool) -> dict[str, Kept]:
        """What becomes of each layer's weight, as ``kept_as`` has it. Raises ModelError as
        ``check`` does."""
        found = {}
        for weight, matrix in self._judged():
            kept = kept_as(matrix, keeps_blocks=keeps_blocks, keeps_orders=keeps_orders)
            rounding = kept.rounding if isinstance(kept, IntegerMatrix) else None
            found[weight] = Kept(None if kept is None else kept.format, rounding)
        return found

    def _judged(self) -> Iterator[tuple[str, StoredMatrix]]:
        for weight in self:
            matrix = self.matrix(
                weight,
                integers=read_array,
                floats=lambda tensor: to_float32(read_array(tensor), tensor.dtype),
                note_rounding=lambda change: None,
            )
            yield weight, matrix

    def matrix(
        self,
        weight: str,
        *,
        integers: Callable[[TensorInfo], npt.NDArray[np.generic]],
        floats: Callable[[TensorInfo], FloatArray],
        note_rounding: Callable[[float], None],
    ) -> StoredMatrix:
        """``weight``, whose tensors have no problems. Raises ModelError if it can't be kept."""
        layer = self[weight]
        tensors = LayerTensors(
            name=layer.name,
            shape=layer.shape,
            stored=self._tensors,
            integers=integers,
            floats=floats,
            note_rounding=note_rounding,
        )
        return layer.layout.matrix(tensors)


NO_LAYERS = StoredLayers(None, {}, {})
"""Of a checkpoint that has none in integers."""


def _is_marked(layout: Layout, weight: str, tensors: Mapping[str, TensorInfo]) -> bool:
    layer = weight.removesuffix(_WEIGHT)
    found = (tensors.get(f"{layer}.{mark}") for mark in layout.marks)
    return any(tensor is not None and not tensor.dtype.startswith(_FLOATS) for tensor in found)
