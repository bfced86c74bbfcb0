"""Taking a checkpoint's tensors out of their files, as matrices, vectors and tables."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from lmi_core.errors import ModelError
from lmi_core.models.linears import RowIds
from lmi_core.models.slices import Bounds
from lmi_core.models.weights import Linear, MappedFile, Table, WeightBackend
from lmi_core.ops.graph import JoinedWeight, LinearWeight, SlicedWeight
from lmi_core.weights.block_matrix import BlockMatrix
from lmi_core.weights.finite import NotFiniteError, check_finite
from lmi_core.weights.float_code_matrix import CODE_BLOCK, FloatCodeMatrix
from lmi_core.weights.float_tensors import DTYPES, to_float32
from lmi_core.weights.formats import BlockFormat, FloatArray, PackFormat, Quantization, WeightFormat
from lmi_core.weights.fp8_checkpoint import FP8_DTYPES, scale_of
from lmi_core.weights.fp8_matrix import Fp8Matrix, expand_scales
from lmi_core.weights.gguf.types import BLOCK_TYPES
from lmi_core.weights.integer_matrix import IntegerMatrix
from lmi_core.weights.made_codes import smoothed, through_codes, to_eetq, to_fp8, to_int8
from lmi_core.weights.matrix import (
    Matrix,
    as_floats,
    dense,
    in_order,
    inputs_of,
    rows_of,
    unit_rows,
)
from lmi_core.weights.quantized.layout import WidenedMatrix
from lmi_core.weights.quantized.stored_layers import StoredLayers
from lmi_core.weights.safetensors_file import TensorInfo

Progress = Callable[[int, int], None]
"""Called with the bytes loaded so far and in all."""

_FORMATS: tuple[Quantization, ...] = ("int4", "int8", "fp8")
_OwnFormat = BlockFormat | Literal["fp16", "nf4", "fp4"]
"""That only products of their own kind take."""


class TensorReader:
    """Takes tensors out of their files, each once, and reports how far it is."""

    def __init__(
        self,
        tensors: Mapping[str, TensorInfo],
        quantized: StoredLayers,
        backend: WeightBackend,
        weight_format: WeightFormat,
        quantize: Quantization | None,
        progress: Progress | None,
        *,
        keeps_halves: bool = False,
    ) -> None:
        """``keeps_halves``: fp16 matrices stay so where ``backend`` has products with them."""
        self.kept: set[Quantization] = set()
        """What matrices of layers were in the checkpoint, and still are."""
        self.widened: set[Quantization] = set()
        """What they were where they are of ``weight_format`` now."""
        self.own_formats: Counter[_OwnFormat] = Counter()
        """Weights of matrices that only products of their own kind take."""
        self.most_rounding = 0.0
        """The largest change of a scale, relative to it."""
        self._tensors = tensors
        self._quantized = quantized
        self._backend = backend
        self.weight_format = weight_format
        self._quantize = quantize
        self._progress = progress
        self._keeps_halves = keeps_halves and backend.keeps_blocks
        self._files: dict[Path, MappedFile] = {}
        self._packed_tables: set[str] = set()
        self._num_bytes_done = 0
        self._num_bytes = sum(tensor.num_bytes for tensor in tensors.values())

    @property
    def keeps_blocks(self) -> bool:
        """Whether matrices that are in blocks stay so."""
        return self._backend.keeps_blocks and self._quantize is None

    @property
    def kept_format(self) -> str | None:
        """Of the smallest of the matrices that were kept; of blocks, all there are, those of most
        weights first."""
        if self.own_formats:
            return ", ".join(name for name, _ in self.own_formats.most_common())
        return next((name for name in _FORMATS if name in self.kept), None)

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
        layer. ``transposed``: matrices are [inputs, outputs]. ``column_factors``: what inputs
        are divided by, whose rows are rounded to int8 then; ``row_divisors``: what outputs are.
        ``normed``: their rows are divided by their lengths. ``inputs``: slices, each packed on its
        own; None: one of all."""
        weight_names = [f"{prefix}.weight" for prefix in prefixes]
        parts = [self.matrix(name) for name in weight_names]
        if transposed:
            parts = [np.ascontiguousarray(part.T) for part in dense(parts)]
        if rows is not None:
            parts = in_order(parts, rows)
        if self._quantize == "smoothquant" and format is None:
            with self._naming_damage(weight_names):
                parts = smoothed(parts, column_factors, row_divisors)
        if normed:
            parts = [unit_rows(part) for part in as_floats(parts)]
        if gated and len(parts) == 1:
            half = len(parts[0]) // 2
            parts = [rows_of(parts[0], slice(half)), rows_of(parts[0], slice(half, None))]
        weight: LinearWeight | JoinedWeight | SlicedWeight
        if inputs is not None:
            weight = self._sliced([parts], weight_names, inputs, format=format)
        else:
            weight = self._pack(parts, weight_names, gated=gated, format=format)
        for name in weight_names:
            self._release(self._stored_as(name))
        self._check_spare_biases(prefixes)
        bias = None
        if self._has_bias(prefixes[0]):
            bias = np.concatenate([self.vector(f"{prefix}.bias") for prefix in prefixes])
            bias = bias if rows is None else bias[rows]
            bias = bias if row_divisors is None else bias / row_divisors
        return Linear(weight, bias)

    def _pack(
        self,
        parts: Sequence[Matrix],
        names: Sequence[str],
        *,
        gated: bool = False,
        format: PackFormat | None = None,
    ) -> LinearWeight | JoinedWeight:
        """As one, or side by side where each stays as it is in a format of its own."""
        own = {self._own_format(part) for part in parts}
        if len(own) > 1:
            return JoinedWeight(
                tuple(
                    self._pack_one([part], [name], format=format)
                    for part, name in zip(parts, names, strict=True)
                )
            )
        return self._pack_one(parts, names, gated=gated, format=format)

    def _sliced(
        self,
        experts: Sequence[Sequence[Matrix]],
        names: Sequence[str],
        bounds: Bounds,
        *,
        format: PackFormat | None = None,
    ) -> SlicedWeight:
        """Of one matrix, or of several experts', slices of inputs."""
        slices = []
        for first, end in bounds:
            try:
                own = [[inputs_of(part, first, end) for part in parts] for parts in experts]
            except ValueError as error:
                raise ModelError(
                    f"{names[0]} can't be cut for tensor_parallel_degree or tp_invariant: {error}; "
                    "write another degree, or leave them out",
                    field="option.tensor_parallel_degree",
                ) from None
            labels = [f"{names[0]}[{first}:{end}]"]
            if len(own) == 1:
                slices.append(self._pack_one(own[0], labels, format=format))
            else:
                slices.append(self._pack_experts(own, labels, gated=False))
        return SlicedWeight(tuple(slices))

    def _pack_one(
        self,
        parts: Sequence[Matrix],
        names: Sequence[str],
        *,
        gated: bool = False,
        format: PackFormat | None = None,
    ) -> LinearWeight:
        own = self._own_format(parts[0])
        if own is not None:
            self.own_formats[own] += sum(len(part) * part.shape[1] for part in parts)
        chosen = own or self._kept_format(parts) or format or self._layer_format(parts)
        if any(isinstance(part, IntegerMatrix) and part.format != chosen for part in parts):
            parts = [*dense(parts)]
        with self._naming_damage(names):
            parts, packed = self._made(parts, chosen)
            return self._backend.pack(parts, names=names, format=packed, gated=gated)

    def _made(
        self, parts: Sequence[Matrix], chosen: PackFormat | Quantization
    ) -> tuple[Sequence[Matrix], PackFormat]:
        """``parts`` for packing as ``chosen``, and the format that they are packed in."""
        if chosen == "smoothquant":
            return parts, "int8"
        if chosen == "llm_int8":
            return [to_int8(part, "llm_int8") for part in as_floats(parts)], "int8"
        if chosen == "eetq":
            return [to_eetq(part) for part in as_floats(parts)], "int8"
        if chosen == "nf4" or chosen == "fp4":
            if any(isinstance(part, FloatCodeMatrix) for part in parts):
                return parts, chosen
            made = [through_codes(part, chosen) for part in as_floats(parts)]
            has_blocks = parts[0].shape[1] % CODE_BLOCK == 0
            return made, chosen if has_blocks else self.weight_format
        if chosen == "fp8" and not all(isinstance(part, Fp8Matrix) for part in parts):
            in_fp8 = [to_fp8(part) for part in as_floats(parts)]
            return in_fp8, "fp8" if self._backend.keeps_fp8(in_fp8) else self.weight_format
        return parts, chosen

    def _own_format(self, part: Matrix) -> _OwnFormat | None:
        """Of a matrix that only products of its own kind take as it is."""
        if isinstance(part, BlockMatrix | FloatCodeMatrix):
            return part.format
        is_half = isinstance(part, np.ndarray) and part.dtype == np.float16
        return "fp16" if is_half and self._keeps_halves else None

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
        if inputs is not None:
            sliced = self._sliced(experts, names, inputs)
            self._release_all(names)
            return sliced
        weight = self._pack_experts(experts, names[:1], gated=gated)
        self._release_all(names)
        return weight

    def _release_all(self, names: Sequence[str]) -> None:
        for name in names:
            self._release(self._stored_as(name))

    def _pack_experts(
        self, experts: list[list[Matrix]], names: Sequence[str], *, gated: bool
    ) -> LinearWeight:
        parts = [part for expert in experts for part in expert]
        own = {self._own_format(part) for part in parts}
        kept = own.pop() if len(own) == 1 else None
        if kept is not None:
            self.own_formats[kept] += sum(len(part) * part.shape[1] for part in parts)
        chosen = kept or self._kept_format(parts) or self._layer_format(parts)
        coded = (part for part in parts if isinstance(part, IntegerMatrix | BlockMatrix))
        if any(part.format != chosen for part in coded):
            experts = [[*dense(expert)] for expert in experts]
        with self._naming_damage(names):
            made = [self._made(expert, chosen) for expert in experts]
            return self._backend.pack_experts(
                [parts for parts, _ in made], names=names, format=made[0][1], gated=gated
            )

    def heads(
        self, name: str, split: Callable[[FloatArray], Sequence[Sequence[FloatArray]]]
    ) -> list[LinearWeight]:
        """Several weights, each of a matrix for every head, made of a tensor; none is quantised."""
        matrix = self.matrix(name)
        if isinstance(matrix, np.ndarray):
            floats = to_float32(matrix, self._tensors[name].dtype)
        else:
            floats = matrix.to_float32()
        with self._naming_damage([name]):
            weights = [
                self._backend.pack_experts(
                    [[head] for head in heads],
                    names=[f"{name} {i}"],
                    format=self.weight_format,
                    gated=False,
                )
                for i, heads in enumerate(split(floats))
            ]
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
        weight = self._pack([rows_of(self.matrix(name), rows)], [name], format=format)
        self._packed_tables |= {name} if rows == slice(None) else set()
        tensor = self._tensors[name]
        self._file(tensor.path).drop(tensor.offset, tensor.num_bytes)
        bias = self.vector(f"{head}.bias")[rows] if self._has_bias(head) else None
        return Linear(weight, bias)

    def vector(self, name: str) -> FloatArray:
        """A float32 copy."""
        check_finite(self._tensors[name], self._view(name))
        values = self._floats(self._tensors[name])
        self._release([name])
        return values

    def rows(self, name: str, row_ids: Sequence[int]) -> FloatArray:
        """A float32 copy of some rows."""
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
        if not self._backend.knows_finite and name not in self._packed_tables:
            check_finite(self._tensors[name], view)
        if self._tensors[name].dtype == "F16" and not self._keeps_halves:
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
                    check_finite(self._tensors[name], self._view(name))
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

    def _kept_format(self, parts: Sequence[Matrix]) -> Quantization | None:
        """Of matrices in integers that can be packed as one as they are; None: others."""
        formats = {part.format if isinstance(part, IntegerMatrix) else None for part in parts}
        kept = formats.pop() if len(formats) == 1 else None
        if kept is not None:
            self.kept.add(kept)
        return kept

    def _layer_format(self, parts: Sequence[Matrix]) -> PackFormat | Quantization:
        if self._quantize is not None:
            return self._quantize
        in_fp8 = [part for part in parts if isinstance(part, Fp8Matrix)]
        if len(in_fp8) == len(parts) and self._backend.keeps_fp8(in_fp8):
            self.kept.add("fp8")
            return "fp8"
        if in_fp8:
            self.widened.add("fp8")
        self.widened |= {part.format for part in parts if isinstance(part, IntegerMatrix)}
        return self.weight_format

    def matrix(self, name: str) -> Matrix:
        if name in self._quantized:
            matrix = self._quantized.matrix(
                name,
                integers=lambda tensor: self._view(tensor.name),
                floats=self._floats,
                note_rounding=self._note_rounding,
            )
            if isinstance(matrix, IntegerMatrix):
                return matrix
            if isinstance(matrix, FloatCodeMatrix) and matrix.has_whole_blocks:
                return matrix if self._backend.keeps_blocks else matrix.to_float32()
            if isinstance(matrix, WidenedMatrix) and matrix.to_blocks is not None:
                is_kept = self._backend.keeps_blocks and self._quantize is None
                return matrix.to_blocks() if is_kept else matrix.to_float32()
            return matrix.to_float32()
        tensor = self._tensors[name]
        if tensor.dtype in BLOCK_TYPES:
            raw = self._file(tensor.path).array(tensor.offset, tensor.num_bytes)
            num_outputs, num_inputs = math.prod(tensor.shape[:-1]), tensor.shape[-1]
            blocks = raw.reshape(num_outputs, -1)
            stored = BlockMatrix(BLOCK_TYPES[tensor.dtype], (num_outputs, num_inputs), blocks)
            return stored if self._backend.keeps_blocks else stored.to_float32()
        if tensor.dtype not in FP8_DTYPES:
            return self._view(name)
        scale = scale_of(tensor, self._tensors)
        assert scale is not None
        scales = self.vector(scale.name)
        if not np.isfinite(scales).all():
            raise ModelError(
                f"{scale.path}: {scale.name} holds a scale that isn't finite; it is damaged",
                field="model",
            )
        codes = self._view(name).view(np.uint8)
        return Fp8Matrix(codes, expand_scales(scales, tensor.shape), FP8_DTYPES[tensor.dtype])

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

    def _note_rounding(self, change: float) -> None:
        self.most_rounding = max(self.most_rounding, change)

    def _floats(self, tensor: TensorInfo) -> FloatArray:
        return to_float32(self._view(tensor.name), tensor.dtype)

    def _view(self, name: str) -> npt.NDArray[np.generic]:
        tensor = self._tensors[name]
        raw = self._file(tensor.path).array(tensor.offset, tensor.num_bytes)
        dtype = np.dtype(DTYPES[tensor.dtype])
        if raw.ctypes.data % dtype.itemsize != 0:
            raw = raw.copy()
        return raw.view(dtype).reshape(tensor.shape)

    def _file(self, path: Path) -> MappedFile:
        if path not in self._files:
            self._files[path] = self._backend.open(path)
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
