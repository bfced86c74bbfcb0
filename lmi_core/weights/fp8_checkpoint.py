"""What a checkpoint with fp8 matrices has beside them, and which of them can be read.

Format: TGI's sources, fp8 and compressed-tensors; Transformers 5 for names. Which matrices are in
fp8 is seen by their data type. On torch devices activations get the checkpoint's scale, if it has
one, or a scale per row; on the CPU they stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from lmi_core.weights.fp8_matrix import FP8_BLOCK, are_scales
from lmi_core.weights.hf_config import HfConfig
from lmi_core.weights.safetensors_file import TensorInfo

FP8_DTYPES: dict[str, Literal["e4m3", "e5m2"]] = {"F8_E4M3": "e4m3", "F8_E5M2": "e5m2"}
"""What they are called in files."""
_SCALE_DTYPES = ("F32", "F16", "BF16")
_SCALES = ("_scale", "_scale_inv")
_ROW_SCALES = ("input_scale", "activation_scale")
FP8_ENDINGS = (
    *(".weight_scale", ".weight_scale_inv", ".input_scale", ".activation_scale"),
    *("_proj_scale", "_proj_scale_inv", "_activation_scale", "_proj_input_scale"),
)
"""Endings of tensors that go with fp8 matrices, or say what we find out ourselves."""
LEAST_ROW_SCALE = 2.0**-100
"""Of activations: the inverse of what is far less overflows."""


def check_blocks(settings: HfConfig) -> None:
    """Raise ModelError for scales of blocks that can't be read."""
    block = settings.values.get("weight_block_size")
    if block is not None and block != [FP8_BLOCK, FP8_BLOCK]:
        raise settings.error(
            "weight_block_size",
            f"is {str(block)[:80]}; blocks of [{FP8_BLOCK}, {FP8_BLOCK}] can be read",
        )


def scale_of(weight: TensorInfo, tensors: Mapping[str, TensorInfo]) -> TensorInfo | None:
    """The tensor with the scales of an fp8 matrix, which multiply under either name."""
    names = (weight.name + ending for ending in _SCALES)
    return next((tensors[name] for name in names if name in tensors), None)


def row_scale_of(
    weight: TensorInfo, tensors: Mapping[str, TensorInfo], settings: HfConfig | None = None
) -> TensorInfo | None:
    """The tensor with the scale of the activations that an fp8 matrix is multiplied with, or with
    those of several matrices in one tensor; None where there is none, or a quantisation's
    ``settings`` say that rows have scales of their own."""
    if settings is not None and settings.values.get("activation_scheme") == "dynamic":
        return None
    is_linear = weight.name.endswith(".weight")
    prefix = weight.name.removesuffix("weight") if is_linear else f"{weight.name}_"
    names = (prefix + ending for ending in _ROW_SCALES)
    return next((tensors[name] for name in names if name in tensors), None)


def scale_problem(
    weight: TensorInfo, tensors: Mapping[str, TensorInfo], *, transposed: bool = False
) -> str | None:
    """What is wrong with the scales of an fp8 matrix, which may be stored [inputs, outputs]; None:
    nothing."""
    scale, row_scale = scale_of(weight, tensors), row_scale_of(weight, tensors)
    if scale is None:
        return f"missing: {weight.name}_scale, the scales of an fp8 matrix"
    for tensor in filter(None, (scale, row_scale)):
        if tensor.dtype not in _SCALE_DTYPES:
            return f"wrong dtype: {tensor.name} is {tensor.dtype}, must be F32, F16 or BF16"
    if row_scale is not None and math.prod(row_scale.shape) not in (1, *weight.shape[:-2]):
        return (
            f"wrong shape: {row_scale.name} is {list(row_scale.shape)}, must be one number for a "
            "matrix"
        )
    order = -1 if transposed else 1
    if not are_scales(scale.shape[::order], weight.shape[::order]):
        return (
            f"wrong shape: {scale.name} is {list(scale.shape)}, must be one number, one per output "
            f"or one per block of {FP8_BLOCK} x {FP8_BLOCK} of {list(weight.shape)}"
        )
    return None


def goes_with_fp8(name: str) -> bool:
    """Whether a tensor of this name may stand beside fp8 matrices."""
    return name.endswith(FP8_ENDINGS)
