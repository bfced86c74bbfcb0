"""The layout of a checkpoint's linear layers, chosen by what its files say of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

from lmi_core.errors import ModelError
from lmi_core.weights.formats import Quantization
from lmi_core.weights.fp8_checkpoint import check_blocks
from lmi_core.weights.hf_config import HfConfig, read_hf_config
from lmi_core.weights.quantized.awq import Awq
from lmi_core.weights.quantized.compressed_tensors import CompressedTensors
from lmi_core.weights.quantized.gptq import Gptq
from lmi_core.weights.quantized.layout import Layout
from lmi_core.weights.quantized.methods import (
    INTEGER_METHODS,
    METHODS,
    CheckpointMethod,
    is_in_fp8,
    objection,
)
from lmi_core.weights.quantized.settings import QuantizationSettings, read_settings

_LAYOUTS: dict[str, Callable[[QuantizationSettings], Layout]] = {
    "awq": Awq,
    "gptq": Gptq,
    "compressed-tensors": CompressedTensors,
}


def read_layout(config: HfConfig) -> Layout | None:
    """How linear layers are stored in integers; None: they aren't (but may be in fp8).

    Raises ModelError for a quantisation that can't be read.
    """
    settings = read_settings(config)
    return None if settings is None else layout_of(settings)


def layout_of(settings: QuantizationSettings) -> Layout | None:
    """As ``read_layout``, of a quantisation's settings."""
    if is_in_fp8(settings):
        check_blocks(settings)
        return None
    method = settings.method
    if method not in _LAYOUTS:
        raise settings.error(
            "quant_method",
            f"is {method[:80]!r}; {', '.join(METHODS)} can be read: use such a checkpoint, or the "
            "model's fp32, bf16 or fp16 one",
        )
    return _LAYOUTS[method](settings)


def can_be_quantized(model: Path) -> bool:
    """Whether the checkpoint in directory ``model`` isn't in integers already."""
    return objection("int4", read_settings(read_hf_config(model))) is None


def quantization_at_load(
    config: HfConfig, asked: Quantization | CheckpointMethod | None
) -> Quantization | None:
    """What matrices are quantised to; None: nothing. ModelError if that doesn't go with the
    checkpoint."""
    if asked is None:
        return None
    if problem := objection(asked, read_settings(config)):
        raise ModelError(f"{config.path}: quantize={asked}: {problem}", field="quantize")
    return None if asked in INTEGER_METHODS else cast(Quantization, asked)
