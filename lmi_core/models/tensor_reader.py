"""Taking a checkpoint's tensors out of their files, as matrices, vectors and tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lmi_core import _native
from lmi_core.errors import ModelError
from lmi_core.models.found_model import FoundModel
from lmi_core.models.slices import Bounds
from lmi_core.models.spec import RowIds
from lmi_core.models.weight_packing import WeightPacking
from lmi_core.models.weights import Linear, is_transposed
from lmi_core.ops.operands import JoinedWeight, LinearWeight, SlicedWeight, Table
from lmi_core.weights.block_matrix import BlockMatrix
from lmi_core.weights.float_tensors import (
    DTYPES,
    NotFiniteError,
    check_finite,
    elements,
    to_float32,
)
from lmi_core.weights.formats import FloatArray, PackFormat
from lmi_core.weights.fp8_checkpoint import (
    FP8_DTYPES,
    LEAST_ROW_SCALE,
    row_scale_of,
    scale_of,
)
from lmi_core.weights.fp8_matrix import Fp8Matrix, expand_scales
from lmi_core.weights.gguf.types import BLOCK_TYPES
from lmi_core.weights.made_codes import smoothed
from lmi_core.weights.matrix import (
    Matrix,
    as_floats,
    dense,
    in_order,
    rows_of,
    unit_rows,
)
from lmi_core.weights.quantized.layout import Blocks, kept_as
from lmi_core.weights.safetensors_file import TensorInfo

Progress = Callable[[int, int], None]
"""Called with the bytes loaded so far and in all."""


class TensorReader:
    """Takes tensors out of their files, each once, and reports how far it is."""

    def __init__(
        self, found: FoundModel, packing: WeightPacking, progress: Progress | None
    ) -> None:
        self._spec = found.spec
        self._quantized = found.quantized
        self._tensors = _needed_tensors(found)
        self.packing = packing
        self._packer = packing.packer
        self._progress = progress
        self._files: dict[Path, _native.MappedFile] = {}
        self._packed_tables: set[str] = set()
        self._num_bytes_done = 0
        self._num_bytes = sum(tensor.num_bytes for tensor in self._tensors.values())

    def linear(
        self,
        prefixes: Sequence[str],
        *,
        gated: bool = False,
        format: PackFormat | None = None,
        rows: RowIds | None = None,
        transposed: bool = False,
        column_factors: FloatArray | None = None,
        row_divisors: FloatArray | None = None,
        normed: bool = False,
        inputs: Bounds | None = None,
    ) -> Linear:
        """The linear layers of these names as one; ``format``: None: that of layers. A matrix in
        integers keeps its own. ``rows``: the outputs that are wanted, in this order, layer after
        layer. ``transposed``: matrices in floats are [inputs, outputs]. ``column_factors``: what
        inputs are divided by, whose rows are rounded to int8 then; ``row_divisors``: what outputs
        are. ``normed``: their rows are divided by their lengths. ``inputs``: slices, each packed on
        its own; None: one of all."""
        weight_names = [f"{prefix}.weight" for prefix in prefixes]
        parts = [self.matrix(name) for name in weight_names]
        if transposed and not any(name in self._quantized for name in weight_names):
            parts = [np.ascontiguousarray(part.T) for part in dense(parts)]
        if rows is not None:
            parts = in_order(parts, rows)
        if self.packing.quantize == "smoothquant" and format is None:
            with self._naming_damage(weight_names):
                parts = smoothed(parts, column_factors, row_divisors)
        if normed:
            parts = [unit_rows(part) for part in as_floats(parts)]
        if gated and len(parts) == 1:
            half = len(parts[0]) // 2
            parts = [rows_of(parts[0], slice(half)), rows_of(parts[0], slice(half, None))]
        weight: LinearWeight | JoinedWeight | SlicedWeight
        with self._naming_damage(weight_names):
            if inputs is not None:
                weight = self.packing.sliced([parts], weight_names, inputs, format=format)
            else:
                weight = self.packing.pack(parts, weight_names, gated=gated, format=format)
        for name in weight_names:
            self._release(self._stored_as(name))
        self._check_spare_biases(prefixes)
        bias = None
        if self._has_bias(prefixes[0]):
            bias = np.concatenate([self.vector(f"{prefix}.bias") for prefix in prefixes])
            bias = bias if rows is None else bias[rows]
            bias = bias if row_divisors is None else bias / row_divisors
        return Linear(weight, bias)

    def experts(
        self,
        names: Sequence[str],
        split: Callable[[list[Matrix]], list[list[Matrix]]],
        *,
        gated: bool,
        rows: slice | None = None,
        inputs: Bounds | None = None,
    ) -> LinearWeight | SlicedWeight:
        """The matrices of a mixture's experts, in the format of layers; ``split``: from the tensors
        of ``names`` to each expert's parts. ``rows``: of each part; ``inputs``: as ``linear``'s."""
        experts = split([self.matrix(name) for name in names])
        if gated and len(experts[0]) == 1:
            half = len(experts[0][0]) // 2
            experts = [
                [rows_of(part, slice(half)), rows_of(part, slice(half, None))]
                for (part,) in experts
            ]
        if rows is not None:
            experts = [[rows_of(part, rows) for part in parts] for parts in experts]
        weight: LinearWeight | SlicedWeight
        with self._naming_damage(names):
            if inputs is not None:
                weight = self.packing.sliced(experts, names, inputs)
            else:
                weight = self.packing.pack_experts(experts, names[:1], gated=gated)
        for name in names:
            self._release(self._stored_as(name))
        return weight

    def heads(
        self,
        names: Sequence[str],
        split: Callable[[list[FloatArray]], Sequence[Sequence[FloatArray]]],
    ) -> list[LinearWeight]:
        """Several weights, each of a matrix for every head, made of tensors; none is quantised."""
        with self._naming_damage(names):
            weights = [
                self._packer.pack_experts(
                    [[head] for head in heads],
                    names=[f"{names[0]} {i}"],
                    format=self.packing.weight_format,
                    gated=False,
                )
                for i, heads in enumerate(split(as_floats([self.matrix(n) for n in names])))
            ]
        for name in names:
            self._release(self._stored_as(name))
        return weights

    def has(self, name: str) -> bool:
        return name in self._tensors

    def tied_head(
        self, name: str, head: str, format: PackFormat, rows: slice | None = None
    ) -> Linear:
        """The embedding, or these of its rows, packed as the output head, which may have a bias of
        its own; its source pages go, the mapping stays."""
        rows = rows or slice(None)
        with self._naming_damage([name]):
            weight = self.packing.pack([rows_of(self.matrix(name), rows)], [name], format=format)
        self._packed_tables |= {name} if rows == slice(None) else set()
        tensor = self._tensors[name]
        self._file(tensor.path).drop(tensor.offset, tensor.num_bytes)
        bias = self.vector(f"{head}.bias")[rows] if self._has_bias(head) else None
        return Linear(weight, bias)

    def vector(self, name: str) -> FloatArray:
        """A float32 copy, in the tensor's shape."""
        values = to_float32(self._finite(name, self._view(name)), self._tensors[name].dtype)
        self._release([name])
        return values

    def rows(self, name: str, row_ids: Sequence[int]) -> FloatArray:
        """A float32 copy of some rows [rows, columns]."""
        matrix = rows_of(self.matrix(name), np.array(row_ids, np.int64))
        if not isinstance(matrix, np.ndarray):
            return matrix.to_float32()
        return to_float32(matrix, self._tensors[name].dtype)

    def table(self, name: str) -> Table:
        """The tensor as stored, mapped; fp16, which few kernels read, as a float32 copy."""
        view = self.matrix(name)
        if not isinstance(view, np.ndarray):
            self._advance(self._tensors[name].num_bytes)
            assert isinstance(view, BlockMatrix)
            return view
        if not self._packer.knows_finite and name not in self._packed_tables:
            self._finite(name, view)
        if self._tensors[name].dtype == "F16" and not self.packing.keeps_halves:
            view = to_float32(view, "F16")
            self._release([name])
        else:
            self._advance(self._tensors[name].num_bytes)
        return view

    @contextmanager
    def _naming_damage(self, names: Sequence[str]) -> Iterator[None]:
        """Say which of the tensors that are packed holds what isn't finite, and where."""
        try:
            yield
        except NotFiniteError:
            for name in names:
                if name not in self._quantized:
                    self._finite(name, self._view(name))
            raise

    def floats(self, name: str) -> npt.NDArray[np.generic]:
        """As ``table``, of a tensor of floats."""
        table = self.table(name)
        return table if isinstance(table, np.ndarray) else table.to_float32()

    def check_files(self) -> None:
        """Raise ModelError if a file was truncated while it was read."""
        for path, file in self._files.items():
            if file.is_lost:
                raise ModelError(f"{path} was truncated while it was loaded")

    def matrix(self, name: str) -> Matrix:
        if name in self._quantized:
            matrix = self._quantized.matrix(
                name,
                integers=lambda tensor: self._view(tensor.name),
                floats=self._floats,
                note_rounding=self.packing.note_rounding,
            )
            kept = kept_as(
                matrix,
                keeps_blocks=self.packing.keeps_blocks,
                keeps_orders=self.packing.keeps_orders,
            )
            if kept is None:
                return matrix.to_float32()
            return kept.read() if isinstance(kept, Blocks) else kept
        tensor = self._tensors[name]
        if tensor.dtype in BLOCK_TYPES:
            raw = self._file(tensor.path).array(tensor.offset, tensor.num_bytes)
            num_outputs, num_inputs = math.prod(tensor.shape[:-1]), tensor.shape[-1]
            blocks = raw.reshape(num_outputs, -1)
            stored = BlockMatrix(BLOCK_TYPES[tensor.dtype], (num_outputs, num_inputs), blocks)
            return stored if self._packer.keeps_blocks else stored.to_float32()
        if tensor.dtype not in FP8_DTYPES:
            return self._view(name)
        scale = scale_of(tensor, self._tensors)
        assert scale is not None
        scales, row_scale = self.vector(scale.name), self._row_scale(tensor)
        codes = self._view(name).view(np.uint8).reshape(-1, tensor.shape[-1])
        format = FP8_DTYPES[tensor.dtype]
        if is_transposed(self._spec, name):
            scales = expand_scales(scales.T, tensor.shape[::-1])
            return Fp8Matrix(codes.T, scales, format).to_float32().T
        return Fp8Matrix(codes, expand_scales(scales, tensor.shape), format, row_scale)

    def _row_scale(self, matrix: TensorInfo) -> float:
        """Of the activations of an fp8 matrix, of several the largest; 0: the checkpoint has
        none."""
        scale = row_scale_of(matrix, self._tensors)
        if scale is None:
            return 0.0
        largest = float(self.vector(scale.name).max())
        if largest < LEAST_ROW_SCALE:
            raise ModelError(
                f"{scale.path}: {scale.name} is {largest:g}, but a scale of activations must be "
                f"{LEAST_ROW_SCALE:g} or more; it is damaged",
                field="model",
            )
        return largest

    def _stored_as(self, weight: str) -> Sequence[str]:
        return [*self._quantized.tensors_of(weight)] if weight in self._quantized else [weight]

    def _has_bias(self, prefix: str) -> bool:
        name = f"{prefix}.bias"
        return name in self._tensors and name not in self._quantized.spare_biases

    def _check_spare_biases(self, prefixes: Sequence[str]) -> None:
        names = {f"{prefix}.bias" for prefix in prefixes}
        for name in names & self._quantized.spare_biases:
            if self.vector(name).any():
                raise ModelError(
                    f"{self._tensors[name].path}: {name} isn't zero, but the layers of this model "
                    "have no such bias; the checkpoint doesn't fit its config.json",
                    field="model",
                )

    def _floats(self, tensor: TensorInfo) -> FloatArray:
        return to_float32(self._view(tensor.name), tensor.dtype)

    def _view(self, name: str) -> npt.NDArray[np.generic]:
        tensor = self._tensors[name]
        raw = self._file(tensor.path).array(tensor.offset, tensor.num_bytes)
        dtype = np.dtype(DTYPES[tensor.dtype])
        if raw.ctypes.data % dtype.itemsize != 0:
            raw = raw.copy()
        return elements(tensor, raw.view(dtype))

    def _finite(self, name: str, view: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        check_finite(self._tensors[name], view)
        return view

    def _file(self, path: Path) -> _native.MappedFile:
        if path not in self._files:
            self._files[path] = _native.MappedFile(str(path))
        return self._files[path]

    def _release(self, names: Sequence[str]) -> None:
        for name in names:
            tensor = self._tensors[name]
            self._file(tensor.path).drop(tensor.offset, tensor.num_bytes)
            self._advance(tensor.num_bytes)

    def _advance(self, num_bytes: int) -> None:
        self._num_bytes_done += num_bytes
        if self._progress is not None:
            self._progress(self._num_bytes_done, self._num_bytes)


def _needed_tensors(found: FoundModel) -> dict[str, TensorInfo]:
    """The tensors that are read, of all that the checkpoint has."""
    tensors, quantized = found.tensors, found.quantized
    needed = {name: tensors[name] for name in quantized.spare_biases}
    for name in (*found.shapes, *found.kv_scales):
        if name in quantized:
            needed |= quantized.tensors_of(name)
            continue
        needed[name] = tensors[name]
        if tensors[name].dtype in FP8_DTYPES:
            settings = found.checkpoint.quantization
            scales = (
                scale_of(tensors[name], tensors),
                row_scale_of(tensors[name], tensors, settings),
            )
            needed |= {scale.name: scale for scale in filter(None, scales)}
    return needed
