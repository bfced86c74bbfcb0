"""Weights in GGUF's types of blocks: codes and scales by least squares, and their bytes.

Format: the structs of blocks in ggml's source. Scales are rounded as they are stored before the
last codes are found.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lmi_core.quantize.gguf import fits
from lmi_core.weights.formats import FloatArray
from lmi_core.weights.gguf.types import TYPES

Bytes = npt.NDArray[np.uint8]
Importance = FloatArray | None
"""Of each weight, in the weights' shape."""
_SUPER = 256
_LOW = np.uint8(15)
_CHUNK_WEIGHTS = 1 << 16
"""Which fit into a core's cache with what is made of them."""
_IQ4 = fits.Table.of(*(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
_BY_NAME = {kind.name: kind for kind in TYPES.values()}


def encode(weights: FloatArray, kind: str, importance: FloatArray | None = None) -> Bytes:
    """Rows [outputs, bytes] of ``weights`` [outputs, inputs], whose inputs are whole blocks.
    ``importance`` [inputs]: of their errors; None: all the same."""
    num_inputs = weights.shape[1]
    block = _BY_NAME[kind]
    row_bytes = num_inputs // block.num_weights * block.num_bytes
    encoded = np.empty((len(weights), row_bytes), np.uint8)
    step = max(1, _CHUNK_WEIGHTS // num_inputs)

    def part(first: int) -> None:
        rows = np.ascontiguousarray(weights[first : first + step], np.float32)
        blocks = rows.reshape(-1, block.num_weights)
        own = None
        if importance is not None:
            own = np.tile(importance.reshape(-1, block.num_weights), (len(rows), 1))
        encoded[first : first + step] = ENCODERS[kind](blocks, own).reshape(len(rows), -1)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        list(threads.map(part, range(0, len(weights), step)))
    return encoded


def _halves(numbers: FloatArray) -> tuple[FloatArray, Bytes]:
    """[n, 1] as fp16 keeps them, and their bytes [n, 2]."""
    stored = np.clip(numbers, -65504, 65504).astype("<f2")
    return stored.astype(np.float32), stored.view(np.uint8).reshape(-1, 2)


def _bits(codes: npt.NDArray[np.uint8], num_bits: int, num_bytes: int = 32) -> Bytes:
    """[blocks, weights] -> bytes: each stretch of ``num_bytes`` has the lowest bits of all, then
    the next ones."""
    shifts = np.arange(0, 8, num_bits, dtype=np.uint8).reshape(1, 1, -1, 1)
    runs = codes.reshape(len(codes), -1, 8 // num_bits, num_bytes) << shifts
    packed: Bytes = np.bitwise_or.reduce(runs, axis=2)
    return packed.reshape(len(codes), -1)


def _fifth(codes: npt.NDArray[np.uint8]) -> Bytes:
    return np.packbits(codes >> np.uint8(4), axis=1, bitorder="little")


@dataclass(frozen=True, slots=True)
class _Scaled:
    """Blocks of 32 with a scale: codes from ``low`` to ``high``, stored from 0 on."""

    low: int
    high: int

    def __call__(self, blocks: FloatArray, importance: Importance) -> Bytes:
        scales, raw = _halves(fits.fit_scales(blocks, importance, self.low, self.high))
        codes = fits.nearest(blocks * fits.inverse(scales), self.low, self.high)
        if self.high == 127:
            return np.concatenate([raw, codes.astype(np.int8).view(np.uint8)], axis=1)
        stored = (codes - self.low).astype(np.uint8)
        fifth = [_fifth(stored)] if self.high > 7 else []
        return np.concatenate([raw, *fifth, _bits(stored & _LOW, 4, 16)], axis=1)


@dataclass(frozen=True, slots=True)
class _Ranged:
    """Blocks of 32 with a scale and a minimum: codes from 0 to ``most``."""

    most: int

    def __call__(self, blocks: FloatArray, importance: Importance) -> Bytes:
        found = fits.fit_ranges(blocks, importance, self.most, has_free_minima=True)
        (scales, raw_scales), (minima, raw_minima) = map(_halves, found)
        codes = fits.nearest((blocks - minima) * fits.inverse(scales), 0, self.most)
        stored = codes.astype(np.uint8)
        fifth = [_fifth(stored)] if self.most > 15 else []
        return np.concatenate([raw_scales, raw_minima, *fifth, _bits(stored & _LOW, 4, 16)], axis=1)


def _iq4_nl(blocks: FloatArray, importance: Importance) -> Bytes:
    scales, raw = _halves(_IQ4.fit(blocks, importance))
    codes = _IQ4.codes(blocks * fits.inverse(scales))
    return np.concatenate([raw, _bits(codes, 4, 16)], axis=1)


@dataclass(slots=True)
class _Coarse:
    """Scales of groups as whole numbers ``low`` to ``high`` of one fp16 number of 256 weights."""

    of_all: FloatArray
    raw: Bytes
    codes: FloatArray
    """[blocks, groups]"""

    @property
    def scales(self) -> FloatArray:
        """[blocks groups, 1]"""
        return (self.of_all * self.codes).reshape(-1, 1)


def _coarse(scales: FloatArray, num_groups: int, low: int, high: int) -> _Coarse:
    """Of ``scales`` [blocks groups, 1]."""
    own = scales.reshape(-1, num_groups)
    at = np.abs(own).argmax(axis=1)[:, None]
    largest = np.take_along_axis(own, at, axis=1)
    end = low if low < 0 else high
    of_all, raw = _halves(largest / np.float32(end))
    return _Coarse(of_all, raw, fits.nearest(own * fits.inverse(of_all), low, high))


def _refined(
    blocks: FloatArray, importance: Importance, codes: FloatArray, coarse: _Coarse
) -> _Coarse:
    """With the number of all that is best for these codes."""
    of_groups = np.repeat(coarse.codes, _SUPER // coarse.codes.shape[1], axis=1)
    values = codes.reshape(-1, _SUPER) * of_groups
    products = fits.sum_of_products(blocks, values, importance)
    squares = fits.sum_of_products(values, values, importance)
    of_all, raw = _halves((products * fits.inverse(squares))[:, None])
    return _Coarse(of_all, raw, coarse.codes)


def _grouped(numbers: Importance, size: int) -> Importance:
    return None if numbers is None else numbers.reshape(-1, size)


def _scaled_groups(
    blocks: FloatArray,
    importance: Importance,
    size: int,
    bounds: tuple[int, int],
    scale_bounds: tuple[int, int],
) -> tuple[_Coarse, npt.NDArray[np.int8]]:
    """Groups of ``size`` with a scale each: coarse scales, and codes [blocks, 256]."""
    groups = blocks.reshape(-1, size)
    scales = fits.fit_scales(groups, _grouped(importance, size), *bounds)
    coarse = _coarse(scales, _SUPER // size, *scale_bounds)
    codes = fits.nearest(groups * fits.inverse(coarse.scales), *bounds)
    coarse = _refined(blocks, importance, codes, coarse)
    codes = fits.nearest(groups * fits.inverse(coarse.scales), *bounds)
    return coarse, codes.astype(np.int8).reshape(-1, _SUPER)


def _q3_k(blocks: FloatArray, importance: Importance) -> Bytes:
    coarse, codes = _scaled_groups(blocks, importance, 16, (-4, 3), (-32, 31))
    stored = (codes + 4).view(np.uint8)
    scales = (coarse.codes + 32).astype(np.uint8)
    low = scales[:, :8] & 15 | (scales[:, 8:] & 15) << 4
    high = (scales >> 4).reshape(-1, 4, 4)
    both = high[:, 0] | high[:, 1] << 2 | high[:, 2] << 4 | high[:, 3] << 6
    return np.concatenate(
        [_bits(stored >> np.uint8(2), 1), _bits(stored & np.uint8(3), 2), low, both, coarse.raw], 1
    )


def _q6_k(blocks: FloatArray, importance: Importance) -> Bytes:
    coarse, codes = _scaled_groups(blocks, importance, 16, (-32, 31), (-128, 127))
    stored = (codes + 32).view(np.uint8)
    scales = coarse.codes.astype(np.int8).view(np.uint8)
    return np.concatenate(
        [_bits(stored & _LOW, 4, 64), _bits(stored >> np.uint8(4), 2), scales, coarse.raw], axis=1
    )


def _iq4_xs(blocks: FloatArray, importance: Importance) -> Bytes:
    groups = blocks.reshape(-1, 32)
    coarse = _coarse(_IQ4.fit(groups, _grouped(importance, 32)), 8, -32, 31)
    codes = _IQ4.codes(groups * fits.inverse(coarse.scales))
    coarse = _refined(blocks, importance, _IQ4.values[codes], coarse)
    codes = _IQ4.codes(groups * fits.inverse(coarse.scales))
    scales = (coarse.codes + 32).astype(np.uint16)
    high = ((scales >> 4) << np.arange(0, 16, 2, dtype=np.uint16)).sum(axis=1).astype("<u2")
    low = (scales & 15).astype(np.uint8)
    stored = codes.reshape(-1, _SUPER)
    high_bytes = high.view(np.uint8).reshape(-1, 2)
    return np.concatenate(
        [coarse.raw, high_bytes, low[:, ::2] | low[:, 1::2] << 4, _bits(stored, 4, 16)], axis=1
    )


@dataclass(frozen=True, slots=True)
class _RangedGroups:
    """Groups of ``size`` with a scale and a minimum each, of ``scale_most`` steps."""

    size: int
    most: int
    scale_most: int
    pack: Callable[[npt.NDArray[np.uint8], _Coarse, _Coarse], Bytes]

    def __call__(self, blocks: FloatArray, importance: Importance) -> Bytes:
        groups, own = blocks.reshape(-1, self.size), _grouped(importance, self.size)
        scales, minima = fits.fit_ranges(groups, own, self.most, has_free_minima=False)
        num_groups = _SUPER // self.size
        coarse, low = (_coarse(each, num_groups, 0, self.scale_most) for each in (scales, -minima))
        codes = self._codes(groups, coarse, low)
        coarse, low = _refined_both(blocks, importance, codes, coarse, low)
        codes = self._codes(groups, coarse, low)
        return self.pack(codes.astype(np.uint8).reshape(-1, _SUPER), coarse, low)

    def _codes(self, groups: FloatArray, scales: _Coarse, low: _Coarse) -> FloatArray:
        return fits.nearest((groups + low.scales) * fits.inverse(scales.scales), 0, self.most)


def _refined_both(
    blocks: FloatArray, importance: Importance, codes: FloatArray, scales: _Coarse, low: _Coarse
) -> tuple[_Coarse, _Coarse]:
    """With the two numbers of all that are best for these codes."""
    size = _SUPER // scales.codes.shape[1]
    a = codes.reshape(-1, _SUPER) * np.repeat(scales.codes, size, axis=1)
    b = -np.repeat(low.codes, size, axis=1)
    aa, ab, bb, ax, bx = (
        fits.sum_of_products(left, right, importance)
        for left, right in ((a, a), (a, b), (b, b), (a, blocks), (b, blocks))
    )
    determinant = aa * bb - ab * ab
    is_plane = determinant > 1e-6 * aa * bb
    divisor = np.where(is_plane, determinant, np.float32(1))
    first = np.where(is_plane, (bb * ax - ab * bx) / divisor, scales.of_all[:, 0])
    second = np.where(is_plane, (aa * bx - ab * ax) / divisor, low.of_all[:, 0])
    is_good = (first > 0) & (second >= 0)
    first = np.where(is_good, first, scales.of_all[:, 0])
    second = np.where(is_good, second, low.of_all[:, 0])
    found = [_halves(each[:, None]) for each in (first, second)]
    return _Coarse(*found[0], scales.codes), _Coarse(*found[1], low.codes)


def _pack_q2_k(codes: npt.NDArray[np.uint8], scales: _Coarse, low: _Coarse) -> Bytes:
    both = scales.codes.astype(np.uint8) | low.codes.astype(np.uint8) << 4
    return np.concatenate([both, _bits(codes, 2), scales.raw, low.raw], axis=1)


def _six_bits(scales: _Coarse, low: _Coarse) -> Bytes:
    """Of 8 scales and 8 minima: the first four of each in 6 bits of a byte, whose others hold the
    highest two of the last four."""
    first, second = (each.codes.astype(np.uint8) for each in (scales, low))
    return np.concatenate(
        [
            first[:, :4] | first[:, 4:] >> 4 << 6,
            second[:, :4] | second[:, 4:] >> 4 << 6,
            first[:, 4:] & 15 | (second[:, 4:] & 15) << 4,
        ],
        axis=1,
    )


def _pack_q4_k(codes: npt.NDArray[np.uint8], scales: _Coarse, low: _Coarse) -> Bytes:
    return np.concatenate([scales.raw, low.raw, _six_bits(scales, low), _bits(codes, 4)], axis=1)


def _pack_q5_k(codes: npt.NDArray[np.uint8], scales: _Coarse, low: _Coarse) -> Bytes:
    parts = [
        scales.raw,
        low.raw,
        _six_bits(scales, low),
        _bits(codes >> np.uint8(4), 1),
        _bits(codes & _LOW, 4),
    ]
    return np.concatenate(parts, axis=1)


ENCODERS: dict[str, Callable[[FloatArray, Importance], Bytes]] = {
    "Q4_0": _Scaled(-8, 7),
    "Q5_0": _Scaled(-16, 15),
    "Q8_0": _Scaled(-127, 127),
    "Q4_1": _Ranged(15),
    "Q5_1": _Ranged(31),
    "Q2_K": _RangedGroups(16, 3, 15, _pack_q2_k),
    "Q3_K": _q3_k,
    "Q4_K": _RangedGroups(32, 15, 63, _pack_q4_k),
    "Q5_K": _RangedGroups(32, 31, 63, _pack_q5_k),
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
"""By type, from blocks [n, weights of a block] to bytes [n, bytes of a block]."""
