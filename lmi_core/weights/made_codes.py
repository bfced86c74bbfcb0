"""Matrices that are quantised while they are loaded, as other libraries quantise them.

Format: TGI's sources, bitsandbytes, EETQ and fp8; EETQ's scale is that of the kernels which
it shares with FasterTransformer, a 128th of an output's largest magnitude.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lmi_core.weights.float_code_matrix import CODE_BLOCK, FloatCodeFormat, to_float_codes
from lmi_core.weights.formats import FloatArray, RowRounding
from lmi_core.weights.fp8_matrix import Fp8Matrix, encode_e4m3
from lmi_core.weights.integer_matrix import INT8_ZERO, Codes, IntegerMatrix
from lmi_core.weights.matrix import Matrix, as_floats

_CHUNK_ROWS = 256


def to_int8(floats: FloatArray, rounding: RowRounding) -> IntegerMatrix:
    """A matrix [outputs, inputs] as bitsandbytes' LLM.int8 and SmoothQuant have it: an output's
    largest magnitude is 127."""

    def unpack() -> Codes:
        most = np.abs(floats).max(axis=1, keepdims=True)
        return _codes(floats, np.float32(127) / _divisor(most), most / np.float32(127), 127)

    return IntegerMatrix("int8", _shape(floats), 0, unpack, rounding)


def smoothed(
    parts: Sequence[Matrix], column_factors: FloatArray | None, row_divisors: FloatArray | None
) -> list[Matrix]:
    """As SmoothQuant has them, in int8 for rows of int8, where inputs are divided by
    ``column_factors`` [inputs]; None: in floats, for int8 with rows that keep their outliers.
    ``row_divisors``: what outputs of all parts are divided by, [outputs]."""
    made: list[Matrix] = []
    first = 0
    for part in as_floats(parts):
        rows = slice(first, first + len(part))
        floats = part if row_divisors is None else part / row_divisors[rows, None]
        first += len(part)
        if column_factors is None:
            made.append(floats)
        else:
            made.append(to_int8(floats * column_factors, "int8"))
    return made


def to_eetq(floats: FloatArray) -> IntegerMatrix:
    """A matrix [outputs, inputs] as EETQ has it, which multiplies rows as they are: an output's
    largest magnitude is 128, and the most is 127."""

    def unpack() -> Codes:
        most = np.abs(floats).max(axis=1, keepdims=True) / np.float32(128)
        scales = most.astype(np.float16).astype(np.float32)
        return _codes(floats, np.float32(1) / _divisor(most), scales, 127)

    return IntegerMatrix("int8", _shape(floats), 0, unpack, "none")


def to_fp8(floats: FloatArray) -> Fp8Matrix:
    """A matrix [outputs, inputs] in e4m3, with a scale per output: its largest magnitude is 448."""
    scales = _divisor(np.abs(floats).max(axis=1, keepdims=True) / np.float32(448))
    codes = np.empty(floats.shape, np.uint8)
    for first in range(0, len(floats), _CHUNK_ROWS):
        rows = slice(first, first + _CHUNK_ROWS)
        codes[rows] = encode_e4m3(floats[rows] / scales[rows])
    return Fp8Matrix(codes, scales)


def through_codes(floats: FloatArray, format: FloatCodeFormat) -> Matrix:
    """In bitsandbytes' 4 bits; rows that aren't of whole blocks as what their codes stand for."""
    coded = to_float_codes(floats, format)
    return floats if floats.shape[1] % CODE_BLOCK == 0 else coded.to_float32()


def _codes(floats: FloatArray, factors: FloatArray, scales: FloatArray, most: int) -> Codes:
    codes = np.empty(floats.shape, np.uint8)
    for first in range(0, len(floats), _CHUNK_ROWS):
        rows = slice(first, first + _CHUNK_ROWS)
        numbers = np.rint(floats[rows] * factors[rows])
        np.clip(numbers, -INT8_ZERO, most, out=numbers)
        codes[rows] = (numbers + INT8_ZERO).astype(np.uint8)
    return Codes(codes, np.asarray(scales, np.float32), np.full_like(scales, INT8_ZERO))


def _divisor(values: FloatArray) -> FloatArray:
    return np.where(values == 0, np.float32(1), values)


def _shape(floats: FloatArray) -> tuple[int, int]:
    return floats.shape[0], floats.shape[1]
