"""What the CPU engine runs of ops: packed weights, and the graph as its own records it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lmi_core import _native
from lmi_core.ops.graph import Graph, Handle, quantized_rows
from lmi_core.ops.operands import JoinedWeight, LinearWeight, SlicedWeight
from lmi_core.settings.engine_config import Activations
from lmi_core.weights.block_matrix import SUM_INPUTS, BlockMatrix
from lmi_core.weights.float_code_matrix import CODE_VALUES, FloatCodeMatrix
from lmi_core.weights.float_tensors import NotFiniteError
from lmi_core.weights.formats import BLOCK_FORMATS, FloatArray, PackFormat, RowRounding
from lmi_core.weights.fp8_matrix import FP8_BLOCK, Fp8Matrix
from lmi_core.weights.integer_matrix import IntegerMatrix
from lmi_core.weights.matrix import Matrix

if TYPE_CHECKING:
    from lmi_core.weights.packed_file import MatrixLayout
    from lmi_core.weights.packed_model import PackedModel

Bytes = npt.NDArray[np.uint8]
Packable = npt.NDArray[np.generic] | tuple[Bytes, FloatArray] | tuple[Bytes, FloatArray, FloatArray]
"""What ``_native.LinearWeight.pack`` takes, which decodes on the way."""

INT4_GROUP_SIZE = 128
"""Inputs per scale where weights are quantised to int4: 4.25 bits a weight, scales and zero points
included."""


class NativeWeights:
    """Packs matrices for the kernels of one instruction set ("": the best).

    What ``packed`` has isn't packed again; it finishes what ``packs_behind`` leaves to it.
    """

    keeps_blocks = True

    def __init__(
        self,
        instruction_set: str = "",
        num_threads: int = 0,
        packed: PackedModel | None = None,
        activations: Activations = "auto",
        packs_behind: bool = False,
    ) -> None:
        self.instruction_set = instruction_set
        self.num_threads = num_threads
        self.packed = packed
        self.packs_behind = packs_behind and packed is not None
        self.knows_finite = packed is not None and packed.is_stored
        self.activations: Activations = activations

    def keeps_fp8(self, parts: Sequence[Fp8Matrix]) -> bool:
        """Of whole blocks of inputs, in one format."""
        is_one = len({part.format for part in parts}) == 1
        return is_one and parts[0].shape[1] % FP8_BLOCK == 0

    def pack(
        self,
        parts: Sequence[Matrix],
        *,
        names: Sequence[str] = (),
        format: PackFormat,
        gated: bool,
        num_experts: int = 1,
    ) -> LinearWeight:
        if format == "fp8":
            (format,) = {part.format for part in parts if isinstance(part, Fp8Matrix)}
        group_size = packed_group_size(parts, format)
        layout: MatrixLayout = {
            "num_outputs": sum(len(part) for part in parts) // num_experts,
            "num_inputs": parts[0].shape[1],
            "format": format,
            "rounding": row_rounding(parts, self.activations),
            "gated": gated,
            "group_size": group_size,
            "num_experts": num_experts,
        }
        label = f"{format}{group_size or ''}{' gated' if gated else ''} {' '.join(names)}"
        weight = None if self.packed is None else self.packed.find(label, layout)
        is_found = weight is not None
        if weight is None:
            weight = _native.LinearWeight.pack(
                packable(parts, group_size),
                format=format,
                rounding=layout["rounding"],
                gated=gated,
                group_size=group_size,
                num_experts=num_experts,
                instruction_set=self.instruction_set,
                num_threads=self.num_threads,
                behind=self.packs_behind,
            )
            if not weight.is_finite:
                raise NotFiniteError(names)
        first = parts[0]  # those that are packed as one have one order of inputs
        if isinstance(first, IntegerMatrix) and first.order is not None:
            weight.order_inputs(first.order)
        if self.packed is not None and not is_found:
            self.packed.add(label, weight)
        return weight

    def pack_experts(
        self,
        experts: Sequence[Sequence[Matrix]],
        *,
        names: Sequence[str] = (),
        format: PackFormat,
        gated: bool,
    ) -> LinearWeight:
        parts = [part for expert in experts for part in expert]
        return self.pack(parts, names=names, format=format, gated=gated, num_experts=len(experts))


def packed_group_size(parts: Sequence[Matrix], format: str) -> int:
    """Inputs per scale of ``parts`` packed as one, or of blocks per sum; 0: a scale per output, or
    none."""
    if format in BLOCK_FORMATS or format in CODE_VALUES:
        return SUM_INPUTS
    if format != "int4":
        return 0
    own = [part.group_size for part in parts if isinstance(part, IntegerMatrix)]
    return min(own, default=INT4_GROUP_SIZE)


def row_rounding(parts: Sequence[Matrix], activations: Activations) -> RowRounding:
    """auto: outliers, but what the scheme of all of ``parts`` says, if it does."""
    if activations != "auto":
        return "int8" if activations == "int8" else "none"
    said = {part.rounding if isinstance(part, IntegerMatrix) else None for part in parts}
    return (said.pop() if len(said) == 1 else None) or "outliers"


def packable(parts: Sequence[Matrix], group_size: int) -> list[Packable]:
    """``parts`` for the native packing in groups of ``group_size``."""

    def of(part: Matrix) -> Packable:
        if isinstance(part, Fp8Matrix):
            return part.codes, np.ascontiguousarray(part.scales)
        if isinstance(part, BlockMatrix):
            return np.ascontiguousarray(part.blocks)
        if isinstance(part, FloatCodeMatrix):
            return part.packable()
        return part.packable(group_size) if isinstance(part, IntegerMatrix) else part

    return [of(part) for part in parts]


def lower(graph: Graph, target: _native.Graph) -> dict[Handle, _native.Handle]:
    """Record ``graph`` into the engine's own, whose methods are the ops; the caller finishes it.
    Returns its handles."""
    quantized = quantized_rows(graph)
    values: dict[Handle, _native.Handle] = {}
    for node in graph.nodes:
        arguments = {**node.attributes, **{name: values[h] for name, h in node.operands.items()}}
        if node.op in ("rms_norm", "norm") and node.result in quantized:
            reader = quantized[node.result]
            arguments["reader"] = reader.parts[0] if isinstance(reader, JoinedWeight) else reader
        if isinstance(arguments.get("weight"), JoinedWeight):
            arguments["weight"] = [*arguments["weight"].parts]
        if isinstance(slices := arguments.get("slices"), SlicedWeight):
            arguments["slices"] = [*slices.slices]
        result = getattr(target, node.op)(**arguments)
        if node.result is not None:
            values[node.result] = result
    return values
