"""GPTQ (arXiv 2210.17323): weights rounded one input after the other, each one's error made up for
by those that follow, as what the layer reads makes them depend on each other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lmi_core.quantize.grids import Coded, Grid
from lmi_core.weights.formats import FloatArray

DAMPING = 0.01
"""Of the mean of the Hessian's diagonal, added to it."""
_BLOCK = 128
"""Inputs after which the rest of the matrix learns of the errors."""


@dataclass(frozen=True, slots=True)
class Factor:
    """What ``gptq`` wants of a Hessian."""

    upper: FloatArray
    """The Cholesky factor of its damped inverse [inputs, inputs], inputs in ``order``."""
    order: npt.NDArray[np.int64] | None
    """In which inputs are rounded; None: as they are."""


class Hessian:
    """Of the squared error of a linear's outputs, by its weights: the mean of x x^T.
    ``by_size``: the inputs that weigh most are rounded first."""

    def __init__(self, *, by_size: bool = False) -> None:
        self._by_size = by_size
        self.sum = np.zeros((), np.float32)
        self.num_rows = 0

    def add(self, rows: FloatArray) -> None:
        """``rows`` [tokens, inputs] that the linear read."""
        self.sum = self.sum + rows.T @ rows
        self.num_rows += len(rows)

    def measured(self) -> Factor:
        """Of all rows so far."""
        order = np.argsort(-self.sum.diagonal(), kind="stable") if self._by_size else None
        sums = self.sum if order is None else self.sum[np.ix_(order, order)]
        hessian = sums.astype(np.float64) / max(self.num_rows, 1)
        diagonal = hessian.diagonal().copy()
        diagonal[diagonal == 0] = 1  # inputs that are always 0
        mean = float(diagonal.mean())
        damping = DAMPING
        while True:
            np.fill_diagonal(hessian, diagonal + damping * mean)
            try:
                lower = np.linalg.cholesky(np.linalg.inv(hessian))
                return Factor(np.ascontiguousarray(lower.T, np.float32), order)
            except np.linalg.LinAlgError:
                damping *= 10  # as many tokens as inputs, or fewer, leave it close to singular


def gptq(weights: FloatArray, grid: Grid, found: Factor) -> Coded:
    """``weights`` [outputs, inputs] on ``grid``, by what was ``found`` of a ``Hessian``."""
    if found.order is not None:
        own = gptq(weights[:, found.order], grid, replace(found, order=None))
        codes, groups = np.empty_like(own.codes), np.empty_like(own.groups)
        codes[:, found.order], groups[found.order] = own.codes, own.groups
        return replace(own, codes=codes, groups=groups)
    factor = found.upper
    left = weights.astype(np.float32, copy=True)
    num_outputs, num_inputs = left.shape
    group_size = grid.group_size or num_inputs
    num_groups = grid.num_groups(num_inputs)
    codes = np.empty(left.shape, np.uint8)
    scales = np.empty((num_outputs, num_groups), np.float32)
    zeros = np.empty_like(scales)
    if num_groups == 1:
        scales[:], zeros[:] = grid.fit(left)
    for first in range(0, num_inputs, _BLOCK):
        last = min(first + _BLOCK, num_inputs)
        block = np.ascontiguousarray(left[:, first:last].T)  # [inputs, outputs]
        errors = np.empty_like(block)
        for i in range(first, last):
            group = i // group_size
            if num_groups > 1 and i % group_size == 0:
                ahead = left[:, i : i + group_size].copy()
                ahead[:, : last - i] = block[i - first :].T[:, :group_size]
                fitted = grid.fit(ahead)
                scales[:, group], zeros[:, group] = fitted[0][:, 0], fitted[1][:, 0]
            column = block[i - first]
            coded = grid.codes(column, scales[:, group], zeros[:, group])
            codes[:, i] = coded
            error = (column - (coded - zeros[:, group]) * scales[:, group]) / factor[i, i]
            errors[i - first] = error
            block[i - first :] -= factor[i, i:last, None] * error
        if last < num_inputs:
            left[:, last:] -= errors.T @ factor[first:last, last:]
    return Coded(grid, codes, scales, zeros, grid.groups(num_inputs))
