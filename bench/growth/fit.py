"""Cost models: seconds = a + b bytes + c operations, whose coefficients aren't negative."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BEND = 0.15
"""A point further than this share from the fit is a bend, to be explained or mended."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Seconds of every step or prompt; per 10^9 bytes; per 10^9 operations."""

    constant: float
    per_gb: float
    per_gop: float

    def seconds(self, cost: tuple[float, float]) -> float:
        return self.constant + self.per_gb * cost[0] + self.per_gop * cost[1]

    def describe(self) -> str:
        parts = [f"{1e3 * self.constant:.3g} ms"] if self.constant else []
        if self.per_gb:
            parts.append(f"bytes at {1 / self.per_gb:.3g} GB/s")
        if self.per_gop:
            parts.append(f"operations at {1 / self.per_gop:.4g} GOP/s")
        return " + ".join(parts) or "nothing"


def fit(costs: Sequence[tuple[float, float]], seconds: Sequence[float]) -> Fit:
    """Least squared relative errors. Of the subsets of terms whose best coefficients are positive
    the one with the least error, so that the result is the non-negative optimum."""
    features = np.array([(1.0, *cost) for cost in costs])
    wanted = np.array(seconds)
    weighted = features / wanted[:, None]
    best, least = np.zeros(3), float(len(wanted))
    for count in (1, 2, 3):
        for columns in itertools.combinations(range(3), count):
            part, *_ = np.linalg.lstsq(weighted[:, columns], np.ones(len(wanted)), rcond=None)
            error = float(np.sum((weighted[:, columns] @ part - 1.0) ** 2))
            if (part >= 0).all() and error < least - 1e-12:
                best, least = np.zeros(3), error
                best[list(columns)] = part
    return Fit(*(float(value) for value in best))
