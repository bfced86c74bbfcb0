"""What a checkpoint with fp8 matrices has beside them, and which of them can be read.

Format: TGI format reference, fp8 and compressed-tensors. Which matrices are in fp8 is seen by their
data type. Activations get a scale per row whatever the checkpoint says of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from lmi_core.models.hf_config import HfConfig
from lmi_core.models.safetensors_file import TensorInfo
from lmi_core.ops.fp8_matrix import FP8_BLOCK, are_scales

FP8_DTYPE = "F8_E4M3"
_SCALE_DTYPES = ("F32", "F16", "BF16")
METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors")
_FORMATS = ("float-quantized", "naive-quantized")
_SCALES = ("_scale", "_scale_inv")
_BESIDE = (".weight_scale", ".weight_scale_inv", ".input_scale")
"""Endings of tensors that go with fp8 matrices, or say what we find out ourselves."""


def check_quantization(config: HfConfig) -> None:
    """Raise ModelError if config.json says that the checkpoint is quantised in another way."""
    quantization = config.values.get("quantization_config")
    if quantization is None:
        return
    settings = quantization if isinstance(quantization, dict) else {}
    method, layout = settings.get("quant_method"), settings.get("format")
    if method not in METHODS or (method == "compressed-tensors" and layout not in _FORMATS):
        what = f"{method!r}" if method != "compressed-tensors" else f"{method!r} as {layout!r}"
        raise config.error(
            "quantization_config",
            f"says that the checkpoint is quantised by {what[:80]}, but quantised checkpoints are "
            "read in fp8 only; use the model's fp8, fp32, bf16 or fp16 checkpoint",
        )
    block = settings.get("weight_block_size")
    if block is not None and block != [FP8_BLOCK, FP8_BLOCK]:
        raise config.error(
            "quantization_config",
            f"has weight_block_size {str(block)[:80]}; blocks of [{FP8_BLOCK}, {FP8_BLOCK}] can "
            "be read",
        )


def scale_of(weight: TensorInfo, tensors: Mapping[str, TensorInfo]) -> TensorInfo | None:
    """The tensor with the scales of an fp8 matrix, which multiply under either name."""
    names = (weight.name + ending for ending in _SCALES)
    return next((tensors[name] for name in names if name in tensors), None)


def scale_problem(weight: TensorInfo, tensors: Mapping[str, TensorInfo]) -> str | None:
    """What is wrong with the scales of an fp8 matrix; None: nothing."""
    scale = scale_of(weight, tensors)
    if scale is None:
        return f"missing: {weight.name}_scale, the scales of an fp8 matrix"
    if scale.dtype not in _SCALE_DTYPES:
        return f"wrong dtype: {scale.name} is {scale.dtype}, must be F32, F16 or BF16"
    if not are_scales(scale.shape, weight.shape):
        return (
            f"wrong shape: {scale.name} is {list(scale.shape)}, must be one number, one per output "
            f"or one per block of {FP8_BLOCK} x {FP8_BLOCK} of {list(weight.shape)}"
        )
    return None


def goes_with_fp8(name: str) -> bool:
    """Whether a tensor of this name may stand beside fp8 matrices."""
    return name.endswith(_BESIDE)
