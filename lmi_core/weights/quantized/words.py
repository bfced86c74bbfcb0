"""Codes of 2 to 8 bits in 32-bit words, the first one in the lowest bits.

Format: TGI's sources, GPTQ, AWQ and compressed-tensors.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of a word's eight columns each of its codes belongs to, in AWQ's order."""
_CODE_MASK = 15


def unpack_rows(words: npt.NDArray[np.generic], num_bits: int) -> Bytes:
    """The codes [rows, columns] of words [rows, columns * num_bits / 32]."""
    stored = np.ascontiguousarray(words).view(np.uint8)
    if num_bits == 8:
        return stored
    if num_bits < 4:
        return _unpack_stream(stored, num_bits)
    codes = np.empty((stored.shape[0], 2 * stored.shape[1]), np.uint8)
    np.bitwise_and(stored, _CODE_MASK, out=codes[:, 0::2])
    np.right_shift(stored, 4, out=codes[:, 1::2])
    return codes


def _unpack_stream(stored: Bytes, num_bits: int) -> Bytes:
    """Codes that follow each other, also across words."""
    bits = np.unpackbits(stored, axis=1, bitorder="little")
    num_codes = bits.shape[1] // num_bits
    of_codes = bits[:, : num_codes * num_bits].reshape(len(stored), num_codes, num_bits)
    codes = np.zeros(of_codes.shape[:2], np.uint8)
    for place in range(num_bits):
        codes |= of_codes[..., place] << np.uint8(place)
    return codes


def unpack_columns(words: npt.NDArray[np.generic], num_bits: int) -> Bytes:
    """The codes [columns, rows] of words [rows * num_bits / 32, columns]."""
    return unpack_rows(words.T, num_bits)


def unpack_gemv_fast(words: npt.NDArray[np.generic]) -> Bytes:
    """The codes [4 rows, columns] of halves of words [rows, columns] in AWQ's order for few rows:
    of 64 columns four rows one after the other, and of 32 columns the pairs of each 8, even ones
    before odd ones."""
    num_rows, num_columns = words.shape
    stored = unpack_rows(words, 4).reshape(num_rows, num_columns // 64, 4, 64)
    rows = stored.transpose(0, 2, 1, 3).reshape(4 * num_rows, num_columns // 32, 4, 2, 4)
    return np.ascontiguousarray(rows.transpose(0, 1, 4, 2, 3)).reshape(4 * num_rows, num_columns)


def unpack_awq(words: npt.NDArray[np.generic]) -> Bytes:
    """The codes [columns, rows] of words [rows, columns / 8] in AWQ's order."""
    columns = np.ascontiguousarray(words.T).view(np.uint32)
    codes = np.empty((len(columns), len(AWQ_COLUMNS), columns.shape[1]), np.uint8)
    for nibble, column in enumerate(AWQ_COLUMNS):
        codes[:, column] = (columns >> np.uint32(4 * nibble)) & np.uint32(_CODE_MASK)
    return codes.reshape(-1, columns.shape[1])
