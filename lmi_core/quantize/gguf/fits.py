"""Scales and codes of groups of neighbouring weights that change them least, by least squares.

A scale is tried around the one that takes the group's largest weight to the largest code; of each,
codes are the nearest, and for these codes the best scale is known in closed form.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lmi_core.weights.formats import FloatArray

_TRIED = np.linspace(-0.9, 0.9, 13, dtype=np.float32)
"""Added to the code of the largest weight."""
_NUM_REFINED = 3
"""Times that codes are made anew of the best scales, and scales of them."""
_TINY = np.float32(1e-30)


def nearest(numbers: FloatArray, low: int, high: int) -> FloatArray:
    """Whole numbers, in place."""
    np.rint(numbers, out=numbers)
    return np.clip(numbers, low, high, out=numbers)


def inverse(scales: FloatArray) -> FloatArray:
    """1 / scales, and 0 of 0."""
    is_small = np.abs(scales) < _TINY
    return np.where(is_small, np.float32(0), 1 / np.where(is_small, np.float32(1), scales))


def _peaks(groups: FloatArray) -> FloatArray:
    return np.take_along_axis(groups, np.abs(groups).argmax(axis=1)[:, None], axis=1)


def fit_scales(
    groups: FloatArray, importance: FloatArray | None, low: int, high: int
) -> FloatArray:
    """Of weights = scale code, codes from ``low`` to ``high``: the scales [n, 1] of ``groups``
    [n, size]. ``importance``: of each weight; None: all the same."""
    weighted = groups if importance is None else groups * importance
    unit = inverse(_peaks(groups))
    ends = {low, high} if low != -high else {high}
    best = np.zeros(len(groups), np.float32)
    scales = np.zeros(len(groups), np.float32)
    codes = np.empty_like(groups)
    for end in sorted(ends):
        for added in _TRIED:
            np.multiply(groups, unit * (end + added), out=codes)
            nearest(codes, low, high)
            _keep_better(weighted, importance, codes, best, scales)
    for _ in range(_NUM_REFINED):
        np.multiply(groups, inverse(scales[:, None]), out=codes)
        nearest(codes, low, high)
        _keep_better(weighted, importance, codes, best, scales)
    return scales[:, None]


@dataclass(frozen=True, slots=True)
class Table:
    """What codes stand for, ascending: whole numbers from -128 on."""

    values: FloatArray
    _nearest: npt.NDArray[np.uint8]
    """Of each half from -128 to 128, the code of what is above it."""

    @classmethod
    def of(cls, *values: int) -> Table:
        own = np.array(values, np.float32)
        between = (own[1:] + own[:-1]) / 2
        halves = np.arange(-256, 257) / 2
        return cls(own, np.searchsorted(between, halves, side="right").astype(np.uint8))

    def codes(self, numbers: FloatArray) -> npt.NDArray[np.uint8]:
        """The nearest to each, in their shape."""
        halves = np.clip(np.floor(numbers * 2), -256, 256).astype(np.int16) + 256
        return self._nearest[halves]

    def fit(self, groups: FloatArray, importance: FloatArray | None) -> FloatArray:
        """As ``fit_scales``, of weights = scale value."""
        weighted = groups if importance is None else groups * importance
        unit = inverse(_peaks(groups))
        best = np.zeros(len(groups), np.float32)
        scales = np.zeros(len(groups), np.float32)
        for end in (self.values[0], self.values[-1]):
            for added in _TRIED:
                values = self.values[self.codes(groups * (unit * (end + 8 * added)))]
                _keep_better(weighted, importance, values, best, scales)
        return scales[:, None]


def _keep_better(
    weighted: FloatArray,
    importance: FloatArray | None,
    codes: FloatArray,
    best: FloatArray,
    scales: FloatArray,
) -> None:
    products = np.einsum("ij,ij->i", weighted, codes)
    squares = sum_of_products(codes, codes, importance)
    found = products / np.maximum(squares, _TINY)
    gains = found * products
    is_better = gains > best
    np.copyto(best, gains, where=is_better)
    np.copyto(scales, found, where=is_better)


def sum_of_products(a: FloatArray, b: FloatArray, importance: FloatArray | None) -> FloatArray:
    """Of each row of [rows, n]: [rows]. ``importance``: of each product; None: all the same."""
    if importance is None:
        products: FloatArray = np.einsum("ij,ij->i", a, b)
        return products
    weighted: FloatArray = np.einsum("ij,ij,ij->i", a, b, importance)
    return weighted


def fit_ranges(
    groups: FloatArray, importance: FloatArray | None, most: int, *, has_free_minima: bool
) -> tuple[FloatArray, FloatArray]:
    """Of weights = scale code + minimum, codes from 0 to ``most``: scales and minima [n, 1], the
    latter at most 0 unless they are free."""
    low, high = groups.min(axis=1), groups.max(axis=1)
    if not has_free_minima:
        low = np.minimum(low, 0)
    fit = _RangeFit(groups, importance, most, has_free_minima, (high - low) / most, low.copy())
    span = inverse((high - low)[:, None])
    for added in _TRIED:
        fit.take(low[:, None], span * (most + added))
    for _ in range(_NUM_REFINED):
        fit.take(fit.minima[:, None], inverse(fit.scales[:, None]))
    return fit.scales[:, None], fit.minima[:, None]


class _RangeFit:
    """The best line through weights found so far, for each group."""

    def __init__(
        self,
        groups: FloatArray,
        importance: FloatArray | None,
        most: int,
        has_free_minima: bool,
        scales: FloatArray,
        minima: FloatArray,
    ) -> None:
        self.scales, self.minima = scales, minima
        self._groups, self._importance = groups, importance
        self._most, self._has_free_minima = most, has_free_minima
        self._ones = np.ones_like(groups) if importance is None else importance
        self._weighted = groups if importance is None else groups * importance
        self._total, self._sums = self._ones.sum(axis=1), self._weighted.sum(axis=1)
        self._best = np.full(len(groups), np.inf, np.float32)
        self._codes = np.empty_like(groups)

    def take(self, low: FloatArray, unit: FloatArray) -> None:
        """Keep the best line for the codes that ``low`` and steps of 1 / ``unit`` give."""
        codes = np.subtract(self._groups, low, out=self._codes)
        codes *= unit
        nearest(codes, 0, self._most)
        of_codes = np.einsum("ij,ij->i", self._ones, codes)
        squares = sum_of_products(codes, codes, self._importance)
        products = np.einsum("ij,ij->i", self._weighted, codes)
        total, sums = self._total, self._sums
        determinant = total * squares - of_codes * of_codes
        is_line = determinant > _TINY
        divisor = np.where(is_line, determinant, np.float32(1))
        scale = np.where(is_line, (total * products - of_codes * sums) / divisor, self.scales)
        minimum = np.where(is_line, (squares * sums - of_codes * products) / divisor, self.minima)
        if not self._has_free_minima:
            is_above = minimum > 0
            scale = np.where(is_above, products / np.maximum(squares, _TINY), scale)
            minimum = np.where(is_above, np.float32(0), minimum)
        changes = scale * scale * squares + minimum * minimum * total
        changes += 2 * (scale * minimum * of_codes - scale * products - minimum * sums)
        is_better = (changes < self._best) & (scale > 0)
        np.copyto(self._best, changes, where=is_better)
        np.copyto(self.scales, scale, where=is_better)
        np.copyto(self.minima, minimum, where=is_better)
