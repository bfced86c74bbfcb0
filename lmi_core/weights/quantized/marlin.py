"""Marlin's layout (IST-DASLab's kernel; as AutoGPTQ and AutoAWQ write it): 4 bits around 8.

weight[n, k] = scales[g, n] (q[k, n] - 8). Codes lie in tiles of 16 inputs by 64 outputs, in the
order in which a warp's threads have them for four products of 16 by 16: thread t has rows r, r + 1,
r + 8 and r + 9 of a quarter, r = 2 (t % 4), of columns t // 4 and t // 4 + 8. Scales of 64 outputs,
and of 32 where a group has all inputs, are in the order in which threads need them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lmi_core.weights.formats import FloatArray
from lmi_core.weights.hf_config import QuantizationSettings
from lmi_core.weights.integer_matrix import IntegerMatrix
from lmi_core.weights.quantized.kept_codes import StoredCodes, groups_in_order, keep_codes
from lmi_core.weights.quantized.layout import FLOAT_DTYPES, LayerTensors, Part, Shape, WidenedMatrix
from lmi_core.weights.quantized.words import unpack_rows

_NUM_BITS = 4
_ZERO = 8
_INPUTS, _OUTPUTS = 16, 64
"""Of a tile."""
_QUARTER = 16
"""Outputs of a quarter of it."""
_GROUP_SIZES = (128, None)


class Marlin:
    ignored = ("workspace",)

    def __init__(self, settings: QuantizationSettings, *, codes: str, scales: str) -> None:
        """``codes``, ``scales``: suffixes of tensors."""
        num_bits = settings.integer("bits", _NUM_BITS)
        if num_bits != _NUM_BITS:
            raise settings.error("bits", f"is {num_bits}; in Marlin's order 4 can be read")
        if settings.boolean("desc_act"):
            raise settings.error("desc_act", "is true, which Marlin's order has no groups for")
        self._group_size = settings.group_size
        if self._group_size not in _GROUP_SIZES:
            raise settings.error(
                "group_size", f"is {self._group_size}; Marlin's order has groups of 128, or -1"
            )
        self.marks = (codes,)
        self._codes, self._scales = codes, scales

    def parts(self, name: str, shape: Shape) -> tuple[Part, ...]:
        num_outputs, num_inputs = shape
        num_groups = -(-num_inputs // (self._group_size or num_inputs))
        per_word = 32 // _NUM_BITS
        words = (num_inputs // _INPUTS, num_outputs * _INPUTS // per_word)
        return (
            Part(self._codes, ("I32",), words),
            Part(self._scales, FLOAT_DTYPES, (num_groups, num_outputs)),
        )

    def matrix(self, layer: LayerTensors) -> IntegerMatrix | WidenedMatrix:
        num_outputs, num_inputs = layer.shape
        if num_inputs % _INPUTS or num_outputs % _OUTPUTS:
            raise layer.error(
                self._codes,
                f"is of {num_outputs} outputs and {num_inputs} inputs; Marlin's tiles have "
                f"{_OUTPUTS} and {_INPUTS}",
            )
        groups = groups_in_order(num_inputs, self._group_size)

        def codes() -> npt.NDArray[np.uint8]:
            return _unpack(layer.integers(layer[self._codes]), num_outputs)

        def scales() -> FloatArray:
            values = layer.floats(layer[self._scales])
            return _in_output_order(values, has_groups=len(values) > 1).T

        def zeros() -> npt.NDArray[np.generic]:
            return np.full((num_outputs, int(groups[-1]) + 1), _ZERO, np.uint8)

        stored = StoredCodes(codes, scales, zeros, self._scales)
        return keep_codes(layer, _NUM_BITS, groups, stored)


def _unpack(words: npt.NDArray[np.generic], num_outputs: int) -> npt.NDArray[np.uint8]:
    """The codes [outputs, inputs] of words [inputs / 16, 2 outputs]."""
    stored = unpack_rows(words, _NUM_BITS).reshape(len(words), -1, _INPUTS * _OUTPUTS)
    tiles = np.empty_like(stored)
    tiles[..., _tile_order()] = stored
    # Quarters [inputs, outputs], one after the other.
    quarters = tiles.reshape(len(words), num_outputs // _QUARTER, _INPUTS, _QUARTER)
    return np.ascontiguousarray(quarters.transpose(1, 3, 0, 2)).reshape(num_outputs, -1)


def _tile_order() -> npt.NDArray[np.intp]:
    """Where in its tile, of four quarters of 16 by 16, each stored code belongs: by thread, quarter
    and place in a word, whose even and odd places have rows of one pair."""
    thread, quarter, place = np.ogrid[:32, :4, :8]
    of_thread = np.array((0, 2, 4, 6, 1, 3, 5, 7))[place]
    half, row = of_thread // 4, of_thread % 4
    rows = 2 * (thread % 4) + row % 2 + 8 * (row // 2)
    columns = thread // 4 + 8 * half
    order: npt.NDArray[np.intp] = (256 * quarter + 16 * rows + columns).ravel()
    return order


def _in_output_order(scales: FloatArray, *, has_groups: bool) -> FloatArray:
    """[groups, outputs]"""
    if has_groups:
        own = scales.reshape(len(scales), -1, 8, 8).swapaxes(2, 3)
    else:
        # Of 32: pairs, four of which a thread's quarter has.
        own = scales.reshape(len(scales), -1, 4, 4, 2).swapaxes(2, 3)
    return own.reshape(scales.shape)
