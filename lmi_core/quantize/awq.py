"""AWQ (arXiv 2306.00978): inputs that are large get finer steps, by factors that multiply their
columns and divide what the layer reads.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from lmi_core.models.smoothing import Share
from lmi_core.quantize.grids import Grid, round_to_nearest
from lmi_core.weights.formats import FloatArray

_NUM_STEPS = 20
_KEPT_ROWS = 512
_LEAST = 1e-4


@dataclass(slots=True)
class Sample:
    """Of what a linear reads: the mean magnitude of each input, and some of the rows."""

    total: FloatArray | None = None
    num_rows: int = 0
    kept: list[FloatArray] = field(default_factory=list)

    def add(self, rows: FloatArray) -> None:
        """[rows, inputs]."""
        sums = np.abs(rows).sum(axis=0, dtype=np.float64)
        self.total = sums if self.total is None else self.total + sums
        self.num_rows += len(rows)
        if (missing := _KEPT_ROWS - sum(map(len, self.kept))) > 0:
            self.kept.append(rows[:: max(1, len(rows) // 64)][:missing].copy())

    def measured(self) -> None:
        """Nothing: factors are found before."""

    @property
    def mean(self) -> FloatArray:
        assert self.total is not None
        return (self.total / self.num_rows).astype(np.float32)


def best_factors(weights: FloatArray, sample: Sample, grid: Grid, share: Share) -> FloatArray:
    """What inputs are divided by, so that rounding ``weights`` [outputs, inputs] changes least of
    what they make of the sample: a power from 0 to 1 of the inputs' mean magnitudes."""
    rows = np.concatenate(sample.kept)
    sizes = np.maximum(share(sample.mean), _LEAST)
    coarse = replace(grid, shrinks=(1.0,))
    least, best = np.inf, np.ones(weights.shape[1], np.float32)
    for step in range(_NUM_STEPS):
        factors = sizes ** np.float32(step / _NUM_STEPS)
        factors /= np.sqrt(factors.max() * factors.min())
        rounded = round_to_nearest(weights * factors, coarse).floats()
        rounded /= factors
        rounded -= weights
        change = float(((rows @ rounded.T) ** 2).mean())
        if change < least:
            least, best = change, factors
    return best
