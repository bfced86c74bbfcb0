"""AWQ's layouts for few rows, gemv and gemv_fast, as AutoAWQ writes them: 4 bits, an output's codes
side by side.

weight[n, k] = scales[n, g] (q[n, k] - z[n, g]) of group g = k // group_size. There is room for more
groups than there are. gemv: words of eight neighbouring codes, the first one in the lowest bits,
and of zero points. gemv_fast: halves of words of four codes, of 4 outputs by 64 inputs; instead of
zero points -scales z, rounded to fp16.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lmi_core.weights.formats import FloatArray
from lmi_core.weights.hf_config import QuantizationSettings
from lmi_core.weights.integer_matrix import IntegerMatrix
from lmi_core.weights.quantized.kept_codes import StoredCodes, groups_in_order, keep_codes
from lmi_core.weights.quantized.layout import LayerTensors, Part, Shape, WidenedMatrix
from lmi_core.weights.quantized.words import unpack_gemv_fast, unpack_rows

_NUM_BITS = 4
_PER_WORD = 8
_OUTPUTS, _INPUTS = 4, 64
"""Of what gemv_fast stores together."""
_WORDS = {64: 2, 32: 4}
"""Of what the number of words of an output's zero points is a multiple, by the size of groups."""
_LEAST_GROUP = 32


class AwqGemv:
    marks = ("qweight", "qzeros")
    ignored = ()

    def __init__(self, settings: QuantizationSettings, *, is_fast: bool) -> None:
        self._group_size = settings.group_size
        self._is_fast = is_fast
        if self._group_size is not None and self._group_size < _LEAST_GROUP:
            raise settings.error(
                "group_size", f"is {self._group_size}; {_LEAST_GROUP} and more can be read"
            )

    def parts(self, name: str, shape: Shape) -> tuple[Part, ...]:
        num_outputs, num_inputs = shape
        num_words = self._num_words(num_inputs)
        if self._is_fast:
            scales = (num_words * _PER_WORD, num_outputs)
            return (
                Part("qweight", ("I16",), (num_outputs // _OUTPUTS, num_inputs)),
                Part("qzeros", ("F16",), scales),
                Part("scales", ("F16",), scales),
            )
        return (
            Part("qweight", ("I32",), (num_outputs, num_inputs // _PER_WORD)),
            Part("qzeros", ("I32",), (num_outputs, num_words)),
            Part("scales", ("F16",), (num_outputs, num_words * _PER_WORD)),
        )

    def matrix(self, layer: LayerTensors) -> IntegerMatrix | WidenedMatrix:
        num_outputs, num_inputs = layer.shape
        groups = groups_in_order(num_inputs, self._group_size)
        num_groups = int(groups[-1]) + 1
        if num_inputs % (self._group_size or num_inputs):
            raise layer.error(
                "qweight", f"has {num_inputs} inputs, which groups of {self._group_size} don't fill"
            )
        whole = _INPUTS if self._is_fast else _PER_WORD
        if num_inputs % whole or (self._is_fast and num_outputs % _OUTPUTS):
            of = f" and outputs of {_OUTPUTS}" if self._is_fast else ""
            raise layer.error(
                "qweight", f"has inputs that aren't a multiple of {whole}{of}: it is damaged"
            )

        def codes() -> npt.NDArray[np.uint8]:
            words = layer.integers(layer["qweight"])
            return unpack_gemv_fast(words) if self._is_fast else unpack_rows(words, _NUM_BITS)

        def scales() -> FloatArray:
            values = layer.floats(layer["scales"])
            return np.ascontiguousarray((values.T if self._is_fast else values)[:, :num_groups])

        def zeros() -> npt.NDArray[np.generic]:
            if self._is_fast:
                return _zero_points(layer, scales(), num_groups)
            packed = unpack_rows(layer.integers(layer["qzeros"]), _NUM_BITS)
            return np.ascontiguousarray(packed[:, :num_groups])

        return keep_codes(layer, _NUM_BITS, groups, StoredCodes(codes, scales, zeros, "scales"))

    def _num_words(self, num_inputs: int) -> int:
        group_size = self._group_size or num_inputs
        least = -(-(num_inputs // group_size) // _PER_WORD)
        multiple = _WORDS.get(group_size, 1)
        return -(-least // multiple) * multiple


def _zero_points(layer: LayerTensors, scales: FloatArray, num_groups: int) -> FloatArray:
    """Those that were multiplied by ``scales``; ModelError where none from 0 to 15 gives what is
    stored."""
    stored = layer.floats(layer["qzeros"]).T[:, :num_groups]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        zeros = np.where(scales == 0, 0, np.rint(-stored / scales)).astype(np.float32)
        made = (-scales * zeros).astype(np.float16).astype(np.float32)
    if not ((zeros >= 0) & (zeros < 2**_NUM_BITS) & (made == stored)).all():
        raise layer.error("qzeros", "isn't scales times whole zero points from 0 to 15")
    return zeros
