"""How much errors of a linear's weights count, by what they are multiplied with."""

from __future__ import annotations

import numpy as np

from lmi_core.weights.formats import FloatArray

_LEAST = 1e-3
"""Of the mean: inputs that the text hardly has may come all the same."""


class MeanSquares:
    """Of each input: the squared error of outputs, by the weight's, where inputs don't depend on
    each other."""

    def __init__(self) -> None:
        self._sum = np.zeros((), np.float64)

    def add(self, rows: FloatArray) -> None:
        """``rows`` [tokens, inputs] that the linear read."""
        self._sum = self._sum + np.einsum("ij,ij->j", rows, rows, dtype=np.float64)

    def measured(self) -> FloatArray:
        """[inputs], 1 on average."""
        mean = float(self._sum.mean()) or 1.0
        relative: FloatArray = (self._sum / mean + _LEAST).astype(np.float32)
        return relative
