"""Codes put into 32-bit words, the first one in the lowest bits: the other way round than in
``weights/quantized/words.py``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lmi_core.weights.quantized.words import AWQ_COLUMNS

Words = npt.NDArray[np.int32]
Codes = npt.NDArray[np.uint8]


def pack_rows(codes: Codes, num_bits: int) -> Words:
    """[rows, columns] -> words [rows, columns num_bits / 32], the last one filled with zeros."""
    per_word = 32 // num_bits
    num_words = -(-codes.shape[1] // per_word)
    padded = np.zeros((len(codes), num_words * per_word), np.uint8)
    padded[:, : codes.shape[1]] = codes
    words = np.zeros((len(codes), num_words), np.uint32)
    for place in range(per_word):
        words |= padded[:, place::per_word].astype(np.uint32) << np.uint32(place * num_bits)
    return words.view(np.int32)


def pack_columns(codes: Codes, num_bits: int) -> Words:
    """[rows, columns] -> words [rows num_bits / 32, columns]."""
    return np.ascontiguousarray(pack_rows(np.ascontiguousarray(codes.T), num_bits).T)


def pack_awq(codes: Codes) -> Words:
    """[rows, columns], columns a multiple of 8 -> words [rows, columns / 8] in AWQ's order."""
    ordered = codes.reshape(len(codes), -1, len(AWQ_COLUMNS))[:, :, list(AWQ_COLUMNS)]
    return pack_rows(ordered.reshape(len(codes), -1), 4)
