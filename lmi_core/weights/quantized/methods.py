"""Ways to quantise a checkpoint, as its files and the option ``quantize`` name them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from lmi_core.weights.hf_config import QuantizationSettings

if TYPE_CHECKING:
    from lmi_core.weights.formats import Quantization

CheckpointMethod = Literal["awq", "gptq", "compressed-tensors", "exl2"]
"""A value of ``quantize`` that says what the checkpoint is."""
LibraryMethod = Literal[
    "bitsandbytes", "bitsandbytes-nf4", "bitsandbytes-fp4", "eetq", "smoothquant"
]
"""One that says as which library weights are quantised at load."""
AT_LOAD: dict[str, Quantization] = {
    "bitsandbytes": "llm_int8",
    "bitsandbytes-nf4": "nf4",
    "bitsandbytes-fp4": "fp4",
    "eetq": "eetq",
    "smoothquant": "smoothquant",
}
"""What is made of weights then."""
BITSANDBYTES = "bitsandbytes"
EXL2 = "exl2"
MARLIN = "marlin"
"""GPTQ's codes in another order."""
INTEGER_METHODS = ("awq", "gptq", "compressed-tensors", EXL2)
FP8_METHODS = ("fp8",)
GGUF = "gguf"
MXFP4 = "mxfp4"
"""Experts in floats of 4 bits."""
MODELOPT = "modelopt"
"""NVIDIA's Model Optimizer: fp8 and NVFP4."""
METHODS = (*INTEGER_METHODS, MARLIN, BITSANDBYTES, *FP8_METHODS, MODELOPT, MXFP4, GGUF)
"""Of checkpoints that can be read."""
_UNWRITTEN = (MODELOPT, MXFP4, GGUF)
"""Those that are no values of ``option.quantize``."""

_FP8_FORMATS = ("float-quantized", "naive-quantized")
"""Those of compressed-tensors."""
_FP4_FORMATS = {"nvfp4-pack-quantized": "NVFP4", "mxfp4-pack-quantized": "MXFP4"}
_NAMES = {name: name.upper() for name in ("awq", "gptq", EXL2, MXFP4)} | {MARLIN: "Marlin"}
_ALSO = {"gptq": ("awq", MARLIN)}
"""Methods that go by another's name too, as in TGI, which reads AWQ as GPTQ."""


def is_in_fp8(settings: QuantizationSettings) -> bool:
    """Whether the quantised matrices are floats of 8 bits."""
    if settings.method == "compressed-tensors":
        return settings.values.get("format") in _FP8_FORMATS
    if settings.method == MODELOPT:
        return settings.values.get("quant_algo") == "FP8"
    return settings.method in FP8_METHODS


def fp4_format(settings: QuantizationSettings) -> str | None:
    """Which floats of 4 bits the quantised matrices are, as their tools store them; None: others,
    or in experts alone."""
    if settings.method == MODELOPT:
        return "NVFP4" if settings.values.get("quant_algo") == "NVFP4" else None
    if settings.method != "compressed-tensors":
        return None
    return _FP4_FORMATS.get(str(settings.values.get("format")))


class _Scheme(NamedTuple):
    """How integers are stored, where settings say so."""

    num_bits: object
    group_size: object
    is_reordered: bool


def _schemes(settings: QuantizationSettings) -> tuple[_Scheme, ...]:
    values = settings.values
    if settings.method == "awq":
        return (_Scheme(values.get("bits", 4), values.get("group_size"), False),)
    if settings.method in ("gptq", MARLIN):
        dynamic = values.get("dynamic")
        own = dynamic.items() if isinstance(dynamic, dict) else ()
        layers = [each for name, each in own if isinstance(each, dict) and name[:2] != "-:"]
        return tuple(_gptq_scheme({**values, **layer}) for layer in ({}, *layers))
    groups = values.get("config_groups")
    schemes = groups.values() if isinstance(groups, dict) else ()
    weights = [scheme.get("weights") for scheme in schemes if isinstance(scheme, dict)]
    return tuple(
        _Scheme(
            each.get("num_bits", 8),
            each.get("group_size"),
            each.get("actorder") in (True, "group", "dynamic"),
        )
        for each in weights
        if isinstance(each, dict) and each.get("type", "int") == "int"
    )


def _gptq_scheme(values: Mapping[str, Any]) -> _Scheme:
    group_size = values.get("group_size")
    is_reordered = values.get("desc_act") is True and group_size not in (-1, None)
    return _Scheme(values.get("bits", 4), group_size, is_reordered)


def stored_as(settings: QuantizationSettings) -> str:
    """The format's name, and how it stores integers."""
    if (floats := fp4_format(settings)) is not None:
        return floats
    if is_in_fp8(settings):
        return "fp8"
    if settings.method == BITSANDBYTES:
        in_4bit = settings.values.get("load_in_4bit")
        kind = settings.values.get("bnb_4bit_quant_type", "fp4") if in_4bit else "int8"
        return f"{BITSANDBYTES} {kind}"
    name = _NAMES.get(settings.method, settings.method)
    words = " and ".join(dict.fromkeys(map(_words, _schemes(settings))))
    return f"{name}, {words}" if words else name


def _words(scheme: _Scheme) -> str:
    num_bits, group_size, is_reordered = scheme
    has_groups = isinstance(group_size, int) and group_size > 0
    groups = f" in groups of {group_size}" if has_groups else ""
    return f"{num_bits} bits{groups}{' with act-order' if is_reordered else ''}"


def widened_format(settings: QuantizationSettings, *, keeps_orders: bool = False) -> str | None:
    """What codes are in that no product takes, so that weights are widened; None: in others.
    ``keeps_orders``: products take int4 with inputs in another order."""
    if settings.method == EXL2:
        return EXL2
    if fp4_format(settings) == "NVFP4":
        return "NVFP4"
    name = settings.method if settings.method == "compressed-tensors" else settings.method.upper()
    for num_bits, group_size, is_reordered in _schemes(settings):
        if is_reordered and not (keeps_orders and num_bits == 4):
            return f"reordered {name}"
        if isinstance(group_size, int) and group_size > 0 and group_size % 32:
            return f"{name} (groups of {group_size})"
    return None


def has_few_bits(settings: QuantizationSettings) -> bool:
    """Whether codes are of 2 or 3 bits, which become blocks of 4."""
    return any(scheme.num_bits in (2, 3) for scheme in _schemes(settings))


def objection(asked: str, settings: QuantizationSettings | None) -> str | None:
    """Why a checkpoint with ``settings`` can't be served with quantize=``asked``; None: it can, or
    can't be read at all, whatever is asked."""
    method = "" if settings is None else settings.method
    if settings is not None and method not in METHODS:
        return None
    if asked in INTEGER_METHODS:
        if method in (asked, *_ALSO.get(asked, ())):
            return None
        if settings is None:
            return (
                "the checkpoint isn't quantised: leave it out, or write int8 or int4 to quantise "
                "at load"
            )
        remedy = "leave it out" if method in _UNWRITTEN else "write that, or leave it out"
        return f"the checkpoint is quantised by {method[:40]}: {remedy}"
    if settings is None or method == MXFP4 or is_in_fp8(settings) or fp4_format(settings):
        return None
    if method == BITSANDBYTES and asked.startswith(BITSANDBYTES):
        return None
    return f"the checkpoint is quantised by {method[:40]} already: leave it out"
