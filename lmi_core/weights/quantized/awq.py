"""AWQ's layouts, and that of version gemm (TGI's sources, AWQ): 4 bits.

weight[k, n] = scales[g, n] (q[k, n] - z[g, n]) of group g = k // group_size; qweight and qzeros
pack q and z along n, eight columns a word, in an order of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import numpy.typing as npt

from lmi_core.weights.hf_config import QuantizationSettings
from lmi_core.weights.integer_matrix import IntegerMatrix
from lmi_core.weights.quantized.awq_gemv import AwqGemv
from lmi_core.weights.quantized.kept_codes import StoredCodes, groups_in_order, keep_codes
from lmi_core.weights.quantized.layout import (
    FLOAT_DTYPES,
    LayerTensors,
    Layout,
    Part,
    Shape,
    WidenedMatrix,
)
from lmi_core.weights.quantized.marlin import Marlin
from lmi_core.weights.quantized.words import unpack_awq

_NUM_BITS = 4
_PER_WORD = 8


def awq_layout(settings: QuantizationSettings) -> Layout:
    """The one that ``settings`` name. Raises ModelError for others than there are."""
    num_bits = settings.integer("bits", _NUM_BITS)
    if num_bits != _NUM_BITS:
        raise settings.error("bits", f"is {num_bits}; AWQ checkpoints of 4 bits can be read")
    version = settings.string("version", "gemm")
    if version.lower() not in _VERSIONS:
        known = ", ".join(_VERSIONS)
        raise settings.error("version", f"is {version[:80]!r}; {known} can be read")
    return _VERSIONS[version.lower()](settings)


class Awq:
    marks = ("qweight", "qzeros")
    ignored = ()

    def __init__(self, settings: QuantizationSettings) -> None:
        self._group_size = settings.group_size

    def parts(self, name: str, shape: Shape) -> tuple[Part, ...]:
        num_outputs, num_inputs = shape
        num_groups = -(-num_inputs // (self._group_size or num_inputs))
        num_words = -(-num_outputs // _PER_WORD)
        return (
            Part("qweight", ("I32",), (num_inputs, num_words)),
            Part("qzeros", ("I32",), (num_groups, num_words)),
            Part("scales", FLOAT_DTYPES, (num_groups, num_outputs)),
        )

    def matrix(self, layer: LayerTensors) -> IntegerMatrix | WidenedMatrix:
        num_outputs, num_inputs = layer.shape

        def codes() -> npt.NDArray[np.uint8]:
            return unpack_awq(layer.integers(layer["qweight"]))[:num_outputs]

        def scales() -> npt.NDArray[np.float32]:
            return layer.floats(layer["scales"]).T

        def zeros() -> npt.NDArray[np.generic]:
            return unpack_awq(layer.integers(layer["qzeros"]))[:num_outputs]

        groups = groups_in_order(num_inputs, self._group_size)
        stored = StoredCodes(codes, scales, zeros, "scales")
        return keep_codes(layer, _NUM_BITS, groups, stored)


_VERSIONS: Mapping[str, Callable[[QuantizationSettings], Layout]] = {
    "gemm": Awq,
    "gemv": partial(AwqGemv, is_fast=False),
    "gemv_fast": partial(AwqGemv, is_fast=True),
    "marlin": partial(Marlin, codes="qweight", scales="scales"),
}
