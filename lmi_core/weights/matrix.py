"""A matrix as a checkpoint has it: an array of floats, or codes and scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from lmi_core import _native
from lmi_core.weights.block_matrix import BlockMatrix
from lmi_core.weights.float_code_matrix import FloatCodeMatrix
from lmi_core.weights.float_tensors import NotFiniteError, to_float32
from lmi_core.weights.formats import FloatArray
from lmi_core.weights.fp8_matrix import Fp8Matrix
from lmi_core.weights.integer_matrix import IntegerMatrix

Matrix = npt.NDArray[np.generic] | Fp8Matrix | IntegerMatrix | BlockMatrix | FloatCodeMatrix


def dense(parts: Sequence[Matrix]) -> list[npt.NDArray[np.generic]]:
    """``parts`` with coded ones as float32."""
    return [part if isinstance(part, np.ndarray) else part.to_float32() for part in parts]


def as_floats(parts: Sequence[Matrix]) -> list[FloatArray]:
    """``parts`` in float32, whatever they are in; NotFiniteError for a NaN or an infinity."""
    stored = dense(parts)
    if not all(map(_native.is_finite, stored)):
        raise NotFiniteError(())
    return [to_float32(part, "BF16" if part.dtype == np.uint16 else "F32") for part in stored]


def rows_of(matrix: Matrix, rows: npt.NDArray[np.int64] | slice) -> Matrix:
    """These of its outputs."""
    if isinstance(matrix, Fp8Matrix):
        return replace(matrix, codes=matrix.codes[rows], scales=matrix.scales[rows])
    return matrix[rows] if isinstance(matrix, np.ndarray) else matrix.rows(rows)


def inputs_of(matrix: Matrix, first: int, end: int) -> Matrix:
    """Its inputs from ``first`` up to ``end``; ValueError where that parts those of one scale."""
    if isinstance(matrix, np.ndarray):
        return np.ascontiguousarray(matrix[:, first:end])
    return matrix.inputs(first, end)


def in_order(parts: Sequence[Matrix], rows: npt.NDArray[np.int64]) -> list[Matrix]:
    """``parts``, one after the other, with these of their outputs, in this order; none leaves its
    part."""
    ordered, first = [], 0
    for part in parts:
        own = rows[(rows >= first) & (rows < first + len(part))] - first
        is_range = len(own) > 0 and bool((np.diff(own) == 1).all())
        ordered.append(rows_of(part, slice(own[0], own[-1] + 1) if is_range else own))
        first += len(part)
    return ordered


def unit_rows(matrix: FloatArray) -> FloatArray:
    """``matrix`` [rows, columns], changed in place, with rows of length 1."""
    lengths = np.sqrt(np.einsum("ij,ij->i", matrix, matrix, dtype=np.float64))
    matrix /= np.maximum(lengths, 1e-12)[:, None].astype(np.float32)
    return matrix
