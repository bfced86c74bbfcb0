"""Codes and scales of a matrix whose weights are rounded to whole numbers, a scale for each group.

weight = scale (code - zero point). Scales are rounded as they are stored before codes are found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lmi_core.weights.formats import FloatArray

Bytes = npt.NDArray[np.uint8]
Store = Callable[[FloatArray], FloatArray]
"""Numbers as the format stores them, in float32."""
SHRINKS = tuple(1 - step / 20 for step in range(8))
"""Of a group's range: a narrower one rounds most weights less, and its outermost more."""


@dataclass(frozen=True, slots=True)
class Grid:
    """What numbers of ``num_bits`` stand for in groups of ``group_size`` inputs; 0: all inputs."""

    num_bits: int
    group_size: int
    is_symmetric: bool
    store: Store
    shrinks: tuple[float, ...] = SHRINKS

    @property
    def most(self) -> int:
        return (1 << self.num_bits) - 1

    def num_groups(self, num_inputs: int) -> int:
        return num_inputs // self.group_size if self.group_size else 1

    def groups(self, num_inputs: int) -> npt.NDArray[np.int32]:
        """Of neighbours: the group of each input."""
        return (np.arange(num_inputs) // (self.group_size or num_inputs)).astype(np.int32)

    def fit(self, group: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Scales and zero points [outputs, 1] of a group's weights [outputs, inputs], of the ranges
        in ``shrinks`` those that change the weights least."""
        best: tuple[FloatArray, FloatArray, FloatArray] | None = None
        for shrink in self.shrinks:
            scales, zeros = self._of_range(group, shrink)
            change = ((self.through(group, scales, zeros) - group) ** 2).sum(axis=1, keepdims=True)
            if best is None:
                best = change, scales, zeros
                continue
            is_less = change < best[0]
            found = (change, scales, zeros)
            best = (
                np.where(is_less, found[0], best[0]),
                np.where(is_less, found[1], best[1]),
                np.where(is_less, found[2], best[2]),
            )
        assert best is not None
        return best[1], best[2]

    def codes(self, weights: FloatArray, scales: FloatArray, zeros: FloatArray) -> FloatArray:
        """The nearest, as whole numbers in float32, in the shape of ``weights``."""
        codes: FloatArray = np.rint(weights / scales) + zeros
        np.clip(codes, 0, self.most, out=codes)
        return codes

    def through(self, weights: FloatArray, scales: FloatArray, zeros: FloatArray) -> FloatArray:
        """What the codes of ``weights`` stand for, in their shape."""
        numbers: FloatArray = (self.codes(weights, scales, zeros) - zeros) * scales
        return numbers

    def _of_range(self, group: FloatArray, shrink: float) -> tuple[FloatArray, FloatArray]:
        if self.is_symmetric:
            most = np.abs(group).max(axis=1, keepdims=True) * np.float32(shrink)
            scales = self.store(most / np.float32(self.most / 2))
            zeros = np.full_like(scales, 2 ** (self.num_bits - 1))
        else:
            high = np.maximum(group.max(axis=1, keepdims=True), 0) * np.float32(shrink)
            low = np.minimum(group.min(axis=1, keepdims=True), 0) * np.float32(shrink)
            scales = self.store((high - low) / np.float32(self.most))
            scales = np.where(scales > 0, scales, np.float32(1))
            zeros = np.clip(np.rint(-low / scales), 0, self.most)
        return np.where(scales > 0, scales, np.float32(1)), zeros


@dataclass(frozen=True, slots=True)
class Coded:
    """A matrix [outputs, inputs] on a grid."""

    grid: Grid
    codes: Bytes
    scales: FloatArray
    """[outputs, groups]; ``zeros`` too"""
    zeros: FloatArray
    groups: npt.NDArray[np.int32]
    """Of each input."""

    def floats(self) -> FloatArray:
        weights = self.codes.astype(np.float32)
        weights -= self.zeros[:, self.groups]
        weights *= self.scales[:, self.groups]
        return weights


def round_to_nearest(weights: FloatArray, grid: Grid) -> Coded:
    """Every weight [outputs, inputs] to the nearest code of its group."""
    num_outputs, num_inputs = weights.shape
    num_groups = grid.num_groups(num_inputs)
    groups = weights.reshape(num_outputs * num_groups, -1)
    scales, zeros = grid.fit(groups)
    codes = grid.codes(groups, scales, zeros).astype(np.uint8).reshape(weights.shape)
    of_groups = (num_outputs, num_groups)
    return Coded(
        grid, codes, scales.reshape(of_groups), zeros.reshape(of_groups), grid.groups(num_inputs)
    )
