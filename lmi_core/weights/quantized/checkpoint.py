"""The layout of a checkpoint's linear layers, chosen by what its files say of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

from lmi_core.errors import ModelError
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.weights.checkpoint import Checkpoint
from lmi_core.weights.formats import Quantization
from lmi_core.weights.fp8_checkpoint import check_blocks
from lmi_core.weights.hf_config import QuantizationSettings
from lmi_core.weights.quantized.awq import awq_layout
from lmi_core.weights.quantized.bitsandbytes import BitsAndBytes
from lmi_core.weights.quantized.compressed_tensors import CompressedTensors
from lmi_core.weights.quantized.exl2 import Exl2
from lmi_core.weights.quantized.fp4 import Fp4
from lmi_core.weights.quantized.gptq import gptq_layout
from lmi_core.weights.quantized.layout import Layout
from lmi_core.weights.quantized.marlin import Marlin
from lmi_core.weights.quantized.methods import (
    AT_LOAD,
    BITSANDBYTES,
    GGUF,
    INTEGER_METHODS,
    MARLIN,
    METHODS,
    MODELOPT,
    MXFP4,
    CheckpointMethod,
    LibraryMethod,
    fp4_format,
    is_in_fp8,
    objection,
    widened_format,
)

_LAYOUTS: dict[str, Callable[[QuantizationSettings], Layout]] = {
    "awq": awq_layout,
    "gptq": gptq_layout,
    MARLIN: partial(Marlin, codes="B", scales="s"),
    "exl2": Exl2,
    "compressed-tensors": CompressedTensors,
    BITSANDBYTES: BitsAndBytes,
}


def layout_of(settings: QuantizationSettings) -> Layout | None:
    """How linear layers are stored in integers; None: they aren't (but may be in fp8 or blocks).

    Raises ModelError for a quantisation that can't be read.
    """
    if settings.method == GGUF:
        return None
    if is_in_fp8(settings):
        check_blocks(settings)
        return None
    if (floats := fp4_format(settings)) is not None:
        return Fp4(settings, has_mx_scales=floats == "MXFP4")
    method = settings.method
    if method == MXFP4:
        return None
    if method == MODELOPT:
        algorithm = str(settings.values.get("quant_algo"))[:40]
        raise settings.error("quant_algo", f"is {algorithm!r}; FP8 and NVFP4 can be read")
    if method not in _LAYOUTS:
        raise settings.error(
            "quant_method",
            f"is {method[:80]!r}; {', '.join(METHODS)} can be read: use such a checkpoint, or the "
            "model's fp32, bf16 or fp16 one",
        )
    return _LAYOUTS[method](settings)


def can_be_quantized(checkpoint: Checkpoint) -> bool:
    """Whether it isn't in integers already."""
    return objection("int4", checkpoint.quantization) is None


def quantization_at_load(
    checkpoint: Checkpoint, asked: Quantization | CheckpointMethod | LibraryMethod
) -> Quantization | None:
    """What matrices are quantised to; None: nothing. ModelError if that doesn't go with the
    checkpoint."""
    if problem := objection(asked, checkpoint.quantization):
        raise ModelError(f"{checkpoint.config.path}: quantize={asked}: {problem}", field="quantize")
    settings = checkpoint.quantization
    if asked in INTEGER_METHODS or (settings is not None and settings.method == BITSANDBYTES):
        return None
    return AT_LOAD.get(asked) or cast(Quantization, asked)


def notes_on_rows(
    checkpoint: Checkpoint, asked: EngineConfig, made: Quantization | None, *, keeps_orders: bool
) -> tuple[str, ...]:
    """What is said where codes are widened (``keeps_orders``: as ``widened_format`` has it), or
    where int8 rows are asked for and matrices meet rows as they are."""
    settings = checkpoint.quantization
    coded = None
    if made is None and settings is not None:
        coded = widened_format(settings, keeps_orders=keeps_orders)
    if coded is not None:
        return (
            f"the checkpoint's {coded} weights are widened when they are loaded, to four times as "
            "much memory or so, and activations stay as they are",
        )
    if asked.device != "cpu" or asked.activations != "int8":
        return ()
    is_kept = made is None and settings is not None and is_in_fp8(settings)
    if made != "fp8" and not is_kept:
        return ()
    return (
        "activations=int8 changes nothing for matrices in fp8, which the CPU engine multiplies "
        "with rows as they are",
    )
