"""What a quantised checkpoint's layout says of a linear layer: its tensors, and what they mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lmi_core.errors import ModelError
from lmi_core.weights.block_matrix import BlockMatrix
from lmi_core.weights.float_code_matrix import FloatCodeMatrix
from lmi_core.weights.formats import BlockFormat, FloatArray
from lmi_core.weights.integer_matrix import IntegerMatrix
from lmi_core.weights.safetensors_file import TensorInfo

FLOAT_DTYPES = ("F16", "BF16", "F32")
Shape = tuple[int, int]
"""Outputs and inputs."""


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor that belongs to a layer: what follows its name, and what it must be."""

    suffix: str
    dtypes: tuple[str, ...]
    shape: tuple[int, ...] | None
    """None: any of one dimension."""
    is_needed: bool = True

    def problem(self, layer: str, tensor: TensorInfo | None) -> str | None:
        """What is wrong with the tensor of ``layer``; None: nothing."""
        name = f"{layer}.{self.suffix}"
        if tensor is None:
            return f"missing: {name} {list(self.shape or ())}" if self.is_needed else None
        if tensor.dtype not in self.dtypes:
            return f"wrong dtype: {name} is {tensor.dtype}, must be {' or '.join(self.dtypes)}"
        if self.shape is None:
            return None
        if (tensor.shape or (1,)) != self.shape:
            return f"wrong shape: {name} is {list(tensor.shape)}, expected {list(self.shape)}"
        return None


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """A layer's tensors while it is read, by what follows its name."""

    name: str
    """Of the layer, as in ``model.layers.0.self_attn.q_proj``."""
    shape: Shape
    stored: Mapping[str, TensorInfo]
    integers: Callable[[TensorInfo], npt.NDArray[np.generic]]
    """A tensor's elements as they are stored."""
    floats: Callable[[TensorInfo], FloatArray]
    note_rounding: Callable[[float], None]
    """Told by how much a scale changes, relative to it, where what is kept has fewer bits."""

    def has(self, suffix: str) -> bool:
        return f"{self.name}.{suffix}" in self.stored

    def __getitem__(self, suffix: str) -> TensorInfo:
        return self.stored[f"{self.name}.{suffix}"]

    def error(self, suffix: str, problem: str) -> ModelError:
        name = f"{self.name}.{suffix}"
        where = f"{self.stored[name].path}: " if name in self.stored else ""
        return ModelError(f"{where}{name} {problem}", field="model")


@dataclass(frozen=True, slots=True)
class Blocks:
    """GGUF's, that stand for the same numbers as a checkpoint's codes."""

    format: BlockFormat
    read: Callable[[], BlockMatrix]


@dataclass(frozen=True, slots=True)
class WidenedMatrix:
    """Codes that no product takes as they are: they are read as floats."""

    shape: Shape
    to_float32: Callable[[], FloatArray]
    """The weights [outputs, inputs]."""
    blocks: Blocks | None = None
    """What some devices' products take; None: there are no such."""
    ordered: IntegerMatrix | None = None
    """The same numbers in int4 with inputs in another order, which some devices' products take."""


StoredMatrix = IntegerMatrix | FloatCodeMatrix | WidenedMatrix
"""What a layer's tensors stand for."""


def kept_as(
    matrix: StoredMatrix, *, keeps_blocks: bool, keeps_orders: bool
) -> IntegerMatrix | FloatCodeMatrix | Blocks | None:
    """What of ``matrix`` is kept; None: its floats. ``keeps_blocks``, ``keeps_orders``: whether
    there are products with blocks and codes of floats, with int4 in another order of inputs."""
    if isinstance(matrix, IntegerMatrix):
        return matrix
    if isinstance(matrix, FloatCodeMatrix):
        return matrix if keeps_blocks and matrix.has_whole_blocks else None
    if keeps_orders and matrix.ordered is not None:
        return matrix.ordered
    return matrix.blocks if keeps_blocks else None


class Layout(Protocol):
    """How a checkpoint stores the linear layers that it quantises."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Suffixes of tensors of codes: a layer that has one, not of floats, is stored so."""
        ...

    @property
    def ignored(self) -> tuple[str, ...]:
        """Suffixes of what may stand beside and isn't read."""
        ...

    def parts(self, name: str, shape: Shape) -> tuple[Part, ...]:
        """The tensors of the layer ``name``."""
        ...

    def matrix(self, layer: LayerTensors) -> StoredMatrix:
        """What the tensors, which are as ``parts`` says, stand for.

        Raises ModelError where it can't be kept exactly.
        """
        ...
