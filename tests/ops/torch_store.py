"""What the reference keeps in torch: matrices and the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lmi_core.ops.operands import ExpertMatrices
from lmi_core.weights.matrix import Matrix, dense

DTypeName = Literal["fp32", "bf16", "fp64"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


class TorchLinearWeight:
    """Matrix [num_outputs, num_inputs]; a gated one holds gate above up."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        self.num_outputs, self.num_inputs = matrix.shape
        self.num_bytes = matrix.numel() * matrix.element_size()
        self.row_format = None


class TorchWeights:
    """Holds matrices as tensors."""

    @property
    def keeps_blocks(self) -> bool:
        return False

    def keeps_fp8(self, parts: Sequence[Matrix]) -> bool:
        return False

    @property
    def knows_finite(self) -> bool:
        return False

    def pack(
        self,
        parts: Sequence[Matrix],
        *,
        names: Sequence[str] = (),
        format: Literal["fp32", "bf16", "int8", "int4", "fp8"],
        gated: bool,
    ) -> TorchLinearWeight:
        if format not in DTYPES:
            raise ValueError(f"the reference has fp32 and bf16 weights, not {format}")
        matrix = torch.cat([tensor_of(part) for part in dense(parts)])
        return TorchLinearWeight(matrix.to(DTYPES[format]))

    def pack_experts(self, experts: Sequence[Sequence[Matrix]], **settings: Any) -> ExpertMatrices:
        return ExpertMatrices(tuple(self.pack(parts, **settings) for parts in experts))


class TorchKvCache:
    """Keys and values, each [layers, slots, kv heads, head_dim]."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: DTypeName | Literal["int8"],
    ) -> None:
        shape = (num_layers, num_blocks * block_size, num_kv_heads, head_dim)
        self.block_size, self.head_dim = block_size, head_dim
        # NaN shows a read of what was never written. int8 keeps what the codes stand for.
        self.is_int8 = dtype == "int8"
        stored = torch.float32 if dtype == "int8" else DTYPES[dtype]
        self.keys = torch.full(shape, torch.nan, dtype=stored)
        self.values = self.keys.clone()

    @property
    def num_bytes(self) -> int:
        return 2 * self.keys.numel() * self.keys.element_size()

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Keys and values [slots, kv heads, head_dim]."""
        for store, rows in ((self.keys, keys), (self.values, values)):
            store[layer, slots] = (_through_int8(rows) if self.is_int8 else rows).to(store.dtype)

    def copy_block(self, src: int, dst: int) -> None:
        size = self.block_size
        for store in (self.keys, self.values):
            store[:, dst * size : (dst + 1) * size] = store[:, src * size : (src + 1) * size]


def tensor_of(values: npt.NDArray[np.generic]) -> Tensor:
    """A tensor of an array as stored, bf16 from uint16; copied: mapped files are read-only."""
    tensor = torch.from_numpy(np.array(values))
    return tensor.view(torch.bfloat16) if values.dtype == np.uint16 else tensor


def _through_int8(x: Tensor) -> Tensor:
    """The nearest multiples of a scale per row, the largest value's 127th part."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale > 0, (x / scale).round() * scale, 0.0)
