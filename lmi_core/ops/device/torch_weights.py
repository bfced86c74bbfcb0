"""Weights as tensors on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lmi_core import _native
from lmi_core.ops.cpu import packable, packed_group_size, row_rounding
from lmi_core.ops.device.fp8_panels import Fp8Rows, pack_fp8, quantize_fp8
from lmi_core.ops.device.packed_weight import PackedWeight
from lmi_core.ops.device.quantized_rows import RowFormat
from lmi_core.ops.device.staged_copies import StagedCopies
from lmi_core.ops.operands import ExpertMatrices
from lmi_core.settings.engine_config import Activations
from lmi_core.weights.float_tensors import NotFiniteError
from lmi_core.weights.formats import PackFormat, RowRounding
from lmi_core.weights.fp8_matrix import Fp8Matrix, common_row_scale
from lmi_core.weights.matrix import Matrix, dense

STAGED_BYTES = 1 << 20
"""Smaller arrays are copied at once."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class DeviceWeight:
    """Matrix [num_outputs, num_inputs]; a gated one holds gate above up."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        self.num_outputs, self.num_inputs = matrix.shape
        self.num_bytes = matrix.numel() * matrix.element_size()
        self.row_format: RowFormat | None = None


class DeviceConstants:
    """Arrays on a device, each once: every layer shares the rope tables."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: dict[int, tuple[npt.NDArray[np.generic], Tensor]] = {}

    def put(self, values: npt.NDArray[np.generic]) -> Tensor:
        """fp32, or bf16 as uint16."""
        entry = self._tensors.get(id(values))
        if entry is None:
            entry = values, as_tensor(values).to(self._device)
            self._tensors[id(values)] = entry
        return entry[1]


class DeviceWeights:
    """Copies matrices to a device, part by part."""

    keeps_blocks = knows_finite = False

    def __init__(self, device: torch.device, activations: Activations = "auto") -> None:
        self.device = device
        self.activations: Activations = activations
        self._staged: StagedCopies | None = None
        """Once there was something large to copy to a GPU."""

    def keeps_fp8(self, parts: Sequence[Fp8Matrix]) -> bool:
        return all(part.format == "e4m3" for part in parts)

    def pack(
        self,
        parts: Sequence[Matrix],
        *,
        names: Sequence[str] = (),
        format: PackFormat,
        gated: bool,
    ) -> DeviceWeight | PackedWeight:
        if format == "fp8":
            in_fp8 = [self._in_fp8(part) for part in parts]
            return pack_fp8(in_fp8, is_gated=gated, row_scale=common_row_scale(parts))
        if format == "int8" or format == "int4":
            return self._pack_quantized(parts, names, format, gated)
        shape = (sum(len(part) for part in parts), parts[0].shape[1])
        matrix = torch.empty(shape, dtype=DTYPES[format], device=self.device)
        first = 0
        for part in parts:
            [values] = dense([part])
            self._copy(values, matrix[first : first + len(part)])
            first += len(part)
        if not matrix.isfinite().all():
            raise NotFiniteError(names)
        return DeviceWeight(matrix)

    def pack_experts(
        self,
        experts: Sequence[Sequence[Matrix]],
        *,
        names: Sequence[str] = (),
        format: PackFormat,
        gated: bool,
    ) -> ExpertMatrices:
        packed = [self.pack(parts, names=names, format=format, gated=gated) for parts in experts]
        if format == "fp8":  # rows become codes once, for all
            scale = common_row_scale([part for parts in experts for part in parts])
            packed = [replace(cast(PackedWeight, weight), row_scale=scale) for weight in packed]
        return ExpertMatrices(tuple(packed))

    def _pack_quantized(
        self,
        parts: Sequence[Matrix],
        names: Sequence[str],
        format: Literal["int8", "int4"],
        gated: bool,
    ) -> PackedWeight:
        """Quantised on the host, by the code that the CPU engine uses, to the same bytes."""
        group_size = packed_group_size(parts, format)
        packed = _native.LinearWeight.pack(
            packable(parts, group_size), format=format, gated=gated, group_size=group_size
        )
        if not packed.is_finite:
            raise NotFiniteError(names)
        return PackedWeight(
            panels=self._put(np.frombuffer(packed.packed(), np.uint8)),
            format=format,
            num_outputs=packed.num_outputs,
            num_inputs=packed.num_inputs,
            group_size=group_size,
            is_gated=gated,
            rounding=_device_rounding(row_rounding(parts, self.activations)),
        )

    def _in_fp8(self, part: Matrix) -> Fp8Rows:
        if not isinstance(part, Fp8Matrix):
            return quantize_fp8(self._put(*dense([part])))
        return self._put(part.codes).view(torch.float8_e4m3fn), self._put(part.scales)

    def _put(self, values: npt.NDArray[np.generic]) -> Tensor:
        """As ``as_tensor``, on the device."""
        if not self._is_staged(values):
            return as_tensor(values).to(self.device)
        tensor = torch.empty(values.shape, dtype=_dtype_of(values), device=self.device)
        self._copy(values, tensor)
        return tensor

    def _copy(self, values: npt.NDArray[np.generic], target: Tensor) -> None:
        if not self._is_staged(values):
            target.copy_(as_tensor(values))
        elif _dtype_of(values) != target.dtype:
            target.copy_(as_tensor(values).to(target.dtype))  # there is no room for both there
        else:
            if self._staged is None:
                self._staged = StagedCopies(self.device)
            self._staged.copy(values, target)

    def _is_staged(self, values: npt.NDArray[np.generic]) -> bool:
        return self.device.type == "cuda" and values.nbytes >= STAGED_BYTES


def _device_rounding(rounding: RowRounding) -> RowRounding:
    """int8 weights meet rows of int8 here, with 16 bits for outliers where more is asked for."""
    return "int8" if rounding == "int8" else "outliers"


def _dtype_of(values: npt.NDArray[np.generic]) -> torch.dtype:
    """Of ``as_tensor``."""
    return as_tensor(values[:0]).dtype


def as_tensor(values: npt.NDArray[np.generic]) -> Tensor:
    """A host tensor of an array as stored, bf16 from uint16; copied: mapped files are read-only."""
    tensor = torch.from_numpy(np.array(values))
    return tensor.view(torch.bfloat16) if values.dtype == np.uint16 else tensor
