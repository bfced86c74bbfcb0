"""bitsandbytes' layouts as Transformers writes them (TGI's sources, bitsandbytes).

4 bits: codes of floats in blocks over the matrix read row by row; scales, in fp32, or in 8 bits in
blocks of their own: absmax[i] = nested_quant_map[code] nested_absmax[i // blocksize] +
nested_offset. 8 bits (LLM.int8): weight[n, k] = SCB[n] q[n, k] / 127, multiplied with rows of int8
but for inputs of 6 and more.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt

from lmi_core.weights.float_code_matrix import (
    CODE_BLOCK,
    CODE_VALUES,
    FloatCodeFormat,
    FloatCodeMatrix,
)
from lmi_core.weights.formats import FloatArray, RowRounding
from lmi_core.weights.hf_config import QuantizationSettings
from lmi_core.weights.integer_matrix import INT8_ZERO, Codes, IntegerMatrix
from lmi_core.weights.quantized.layout import LayerTensors, Part, Shape

THRESHOLD = 6.0
"""Of LLM.int8: magnitudes from which on inputs aren't rounded."""
_FORMATS: tuple[FloatCodeFormat, ...] = ("nf4", "fp4")
_NESTED_BLOCK = 256
_MAX_STATE_BYTES = 4096


class BitsAndBytes:
    marks = ("weight",)
    ignored = ("weight_format",)

    def __init__(self, settings: QuantizationSettings) -> None:
        self._in_4bit = settings.boolean("load_in_4bit")
        if not self._in_4bit and not settings.boolean("load_in_8bit"):
            raise settings.error(
                "load_in_4bit", "is false, and so is load_in_8bit: one must be true"
            )
        self._format: FloatCodeFormat = "nf4"
        self._rounding: RowRounding = "llm_int8"
        if self._in_4bit:
            kind = settings.string("bnb_4bit_quant_type", "fp4")
            if kind not in _FORMATS:
                raise settings.error(
                    "bnb_4bit_quant_type", f"is {kind[:40]!r}; nf4, fp4 can be read"
                )
            self._format = kind
            storage = settings.string("bnb_4bit_quant_storage", "uint8")
            if storage != "uint8":
                raise settings.error(
                    "bnb_4bit_quant_storage", f"is {storage[:40]!r}; uint8 can be read"
                )
            return
        threshold = settings.values.get("llm_int8_threshold", THRESHOLD)
        if threshold not in (0.0, THRESHOLD):
            raise settings.error(
                "llm_int8_threshold",
                f"is {str(threshold)[:40]}; {THRESHOLD}, and 0 can be computed",
            )
        self._rounding = "llm_int8" if threshold else "int8"

    def parts(self, name: str, shape: Shape) -> tuple[Part, ...]:
        num_weights = shape[0] * shape[1]
        if not self._in_4bit:
            return Part("weight", ("I8",), shape), Part("SCB", ("F32",), (shape[0],))
        num_scales = -(-num_weights // CODE_BLOCK)
        num_nested = -(-num_scales // _NESTED_BLOCK)
        return (
            Part("weight", ("U8",), (-(-num_weights // 2), 1)),
            Part("weight.absmax", ("F32", "U8"), (num_scales,)),
            Part("weight.quant_map", ("F32",), (len(CODE_VALUES["nf4"]),)),
            Part("weight.nested_absmax", ("F32",), (num_nested,), is_needed=False),
            Part("weight.nested_quant_map", ("F32",), (_NESTED_BLOCK,), is_needed=False),
            Part(self._state, ("U8",), None),
        )

    @property
    def _state(self) -> str:
        return f"weight.quant_state.bitsandbytes__{self._format}"

    def matrix(self, layer: LayerTensors) -> IntegerMatrix | FloatCodeMatrix:
        return self._four_bits(layer) if self._in_4bit else self._eight_bits(layer)

    def _eight_bits(self, layer: LayerTensors) -> IntegerMatrix:
        scales = layer.floats(layer["SCB"]).reshape(-1, 1) * np.float32(1 / 127)
        if not np.isfinite(scales).all():
            raise layer.error("SCB", "holds a scale that isn't finite; it is damaged")

        def unpack() -> Codes:
            codes = layer.integers(layer["weight"]).view(np.uint8) + np.uint8(INT8_ZERO)
            return Codes(codes, scales, np.full_like(scales, INT8_ZERO))

        return IntegerMatrix("int8", layer.shape, 0, unpack, self._rounding)

    def _four_bits(self, layer: LayerTensors) -> FloatCodeMatrix:
        offset = self._check_state(layer)
        values = layer.floats(layer["weight.quant_map"])
        if not np.array_equal(values, CODE_VALUES[self._format]):
            raise layer.error(
                "weight.quant_map", f"isn't that of {self._format}, the only one that is computed"
            )
        scales = _scales(layer, offset)

        def unpack() -> tuple[npt.NDArray[np.uint8], FloatArray]:
            return layer.integers(layer["weight"]).view(np.uint8).ravel(), scales

        return FloatCodeMatrix(self._format, layer.shape, unpack)

    def _check_state(self, layer: LayerTensors) -> float:
        """What is added to scales. ModelError for a state that isn't that of the other tensors."""
        tensor = layer[self._state]
        state: Any = None
        if tensor.num_bytes <= _MAX_STATE_BYTES:
            try:
                state = json.loads(layer.integers(tensor).tobytes())
            except (ValueError, RecursionError):
                state = None
        if not isinstance(state, dict):
            raise layer.error(self._state, "holds no JSON object; it is damaged")
        wanted = {"quant_type": self._format, "blocksize": CODE_BLOCK, "shape": [*layer.shape]}
        if layer.has("weight.nested_absmax"):
            wanted["nested_blocksize"] = _NESTED_BLOCK
        for key, value in wanted.items():
            if state.get(key) != value:
                raise layer.error(
                    self._state, f"says {key} {str(state.get(key))[:80]}; {value} can be read"
                )
        offset = state.get("nested_offset", 0.0)
        is_number = isinstance(offset, int | float) and not isinstance(offset, bool)
        if not is_number or not np.isfinite(offset):
            raise layer.error(self._state, f"says nested_offset {str(offset)[:40]}")
        return float(offset)


def _scales(layer: LayerTensors, offset: float) -> FloatArray:
    absmax = layer["weight.absmax"]
    if absmax.dtype == "F32":
        scales = layer.floats(absmax).copy()
    else:
        for suffix in ("weight.nested_absmax", "weight.nested_quant_map"):
            if not layer.has(suffix):
                raise layer.error("weight.absmax", f"is in 8 bits, but there is no {suffix}")
        values = layer.floats(layer["weight.nested_quant_map"])
        scales = values[layer.integers(absmax)]
        nested = np.repeat(layer.floats(layer["weight.nested_absmax"]), _NESTED_BLOCK)
        scales = scales * nested[: len(scales)] + np.float32(offset)
    if not np.isfinite(scales).all():
        raise layer.error("weight.absmax", "holds a scale that isn't finite; it is damaged")
    return np.asarray(scales, np.float32)
