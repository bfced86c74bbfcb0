"""NVFP4 as compressed-tensors and NVIDIA's Model Optimizer store it, and the former's MXFP4.

Format: a weight is a float of 4 bits (e2m1), two in a byte, the first in its lower half, times a
scale for 16 neighbours in e4m3 (of MXFP4: 32, a power of two), times one for the whole matrix,
which compressed-tensors stores as its inverse. NVFP4 is widened; MXFP4 becomes GGUF's blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lmi_core.weights.block_matrix import BlockMatrix
from lmi_core.weights.formats import FloatArray
from lmi_core.weights.fp8_matrix import Fp8Matrix
from lmi_core.weights.hf_config import QuantizationSettings
from lmi_core.weights.mxfp4 import E2M1_PAIRS, MXFP4_BLOCK, mx_scales, mxfp4_matrix
from lmi_core.weights.quantized.layout import Blocks, LayerTensors, Part, Shape, WidenedMatrix

NVFP4_BLOCK = 16


@dataclass(frozen=True, slots=True)
class _Names:
    """What follows a layer's name: of codes, of the scale for all, and of what isn't read."""

    codes: str
    whole: str
    ignored: tuple[str, ...]


_COMPRESSED = _Names(
    "weight_packed", "weight_global_scale", ("input_global_scale", "input_scale", "weight_shape")
)
_MODELOPT = _Names("weight", "weight_scale_2", ("input_scale", "pre_quant_scale"))


class Fp4:
    """A layout of floats of 4 bits; ``has_mx_scales``: MXFP4's."""

    def __init__(self, settings: QuantizationSettings, *, has_mx_scales: bool) -> None:
        self._has_mx_scales = has_mx_scales
        self._block = MXFP4_BLOCK if has_mx_scales else NVFP4_BLOCK
        self._names = _MODELOPT if settings.method == "modelopt" else _COMPRESSED
        self.marks = (self._names.codes,)
        self.ignored = self._names.ignored

    def parts(self, name: str, shape: Shape) -> tuple[Part, ...]:
        num_outputs, num_inputs = shape
        scales = (num_outputs, -(-num_inputs // self._block))
        codes = Part(self._names.codes, ("U8",), (num_outputs, -(-num_inputs // 2)))
        if self._has_mx_scales:
            return codes, Part("weight_scale", ("U8", "F8_E8M0"), scales)
        scale = Part("weight_scale", ("F8_E4M3",), scales)
        return codes, scale, Part(self._names.whole, ("F32",), (1,))

    def matrix(self, layer: LayerTensors) -> WidenedMatrix:
        num_outputs, num_inputs = layer.shape
        if num_inputs % self._block:
            raise layer.error(
                self._names.codes,
                f"is of {num_inputs} inputs, which aren't blocks of {self._block}",
            )
        whole = np.float32(1)
        if not self._has_mx_scales:
            whole = np.float32(layer.floats(layer[self._names.whole]).ravel()[0])
            if not np.isfinite(whole) or whole <= 0:
                raise layer.error(
                    self._names.whole, f"is {whole}, but must be a positive number; it is damaged"
                )

        def unpack() -> FloatArray:
            codes = layer.integers(layer[self._names.codes]).view(np.uint8)
            values = E2M1_PAIRS[codes].reshape(num_outputs, -1, self._block)
            values *= self._scales(layer, whole)[..., None]
            return values.reshape(layer.shape)

        def to_blocks() -> BlockMatrix:
            codes = layer.integers(layer[self._names.codes]).view(np.uint8)
            stored = layer.integers(layer["weight_scale"]).view(np.uint8)
            return mxfp4_matrix(codes.reshape(num_outputs, -1, MXFP4_BLOCK // 2), stored)

        blocks = Blocks("mxfp4", to_blocks) if self._has_mx_scales else None
        return WidenedMatrix(layer.shape, unpack, blocks)

    def _scales(self, layer: LayerTensors, whole: np.float32) -> FloatArray:
        """Of blocks [outputs, blocks], those of the matrix included."""
        stored = layer.integers(layer["weight_scale"]).view(np.uint8)
        if self._has_mx_scales:
            scales = mx_scales(stored)
        else:
            scales = Fp8Matrix(stored, np.ones((len(stored), 1), np.float32)).to_float32()
        if np.isnan(scales).any():
            raise layer.error("weight_scale", "holds a scale that is NaN; it is damaged")
        return scales * whole if self._names is _MODELOPT else scales / whole
