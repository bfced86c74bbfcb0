"""GGUF's types of blocks as float32, by the definitions in ggml's source, a weight at a time in
order: slow and plain. ``tests/weights/test_block_reference.py`` holds it against the gguf package
where that is installed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tests.gguf_files import BLOCKS

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def dequantize(kind: str, rows: Bytes) -> Floats:
    """[rows, bytes] to [rows, weights]."""
    _, num_bytes = BLOCKS[kind]
    blocks = rows.reshape(-1, num_bytes)
    weights = globals()[f"_{kind.lower()}"](blocks)
    return np.ascontiguousarray(weights, np.float32).reshape(len(rows), -1)


def _half(blocks: Bytes, at: int) -> Floats:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> npt.NDArray[np.int64]:
    """Low ones, then high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.int64)


def _fifth(blocks: Bytes, at: int) -> npt.NDArray[np.int64]:
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little").astype(np.int64) << 4


def _q4_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]) - 8).astype(np.float32)


def _q4_1(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    codes = _nibbles(blocks[:, 6:]) | _fifth(blocks, 2)
    return _half(blocks, 0) * (codes - 16).astype(np.float32)


def _q5_1(blocks: Bytes) -> Floats:
    codes = _nibbles(blocks[:, 8:]) | _fifth(blocks, 4)
    return _half(blocks, 0) * codes.astype(np.float32) + _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _iq4_nl(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * np.array(IQ4, np.float32)[_nibbles(blocks[:, 2:])]


def _mxfp4(blocks: Bytes) -> Floats:
    scales = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128).astype(np.float32)
    return scales * np.array(E2M1, np.float32)[_nibbles(blocks[:, 1:])]


def _bits(packed: Bytes, num_bits: int, num_bytes: int = 32) -> npt.NDArray[np.int64]:
    """Of each stretch of bytes the lowest bits of all, then the next ones: [blocks, weights]."""
    runs = packed.reshape(len(packed), -1, 1, num_bytes).astype(np.int64)
    shifts = np.arange(0, 8, num_bits).reshape(1, 1, -1, 1)
    return ((runs >> shifts) & ((1 << num_bits) - 1)).reshape(len(packed), -1)


def _by_group(numbers: npt.NDArray[np.generic], group: int) -> Floats:
    return np.repeat(numbers.astype(np.float32), group, axis=1)


def _q2_k(blocks: Bytes) -> Floats:
    scales = _by_group(_half(blocks, 80) * (blocks[:, :16] & 15), 16)
    minima = _by_group(_half(blocks, 82) * (blocks[:, :16] >> 4), 16)
    return scales * _bits(blocks[:, 16:80], 2).astype(np.float32) - minima


def _q3_k(blocks: Bytes) -> Floats:
    packed = blocks[:, 96:108].astype(np.int64)
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    high = np.concatenate([packed[:, 8:] >> shift & 3 for shift in (0, 2, 4, 6)], axis=1)
    scales = _by_group(_half(blocks, 108) * ((low | high << 4) - 32).astype(np.float32), 16)
    codes = _bits(blocks[:, 32:96], 2) + 4 * _bits(blocks[:, :32], 1) - 4
    return scales * codes.astype(np.float32)


def _scales6(blocks: Bytes) -> tuple[Floats, Floats]:
    first, second, both = (blocks[:, at : at + 4].astype(np.int64) for at in (4, 8, 12))
    scales = np.concatenate([first & 63, both & 15 | first >> 6 << 4], axis=1)
    minima = np.concatenate([second & 63, both >> 4 | second >> 6 << 4], axis=1)
    return (
        _by_group(_half(blocks, 0) * scales.astype(np.float32), 32),
        _by_group(_half(blocks, 2) * minima.astype(np.float32), 32),
    )


def _q4_k(blocks: Bytes) -> Floats:
    scales, minima = _scales6(blocks)
    return scales * _bits(blocks[:, 16:], 4).astype(np.float32) - minima


def _q5_k(blocks: Bytes) -> Floats:
    scales, minima = _scales6(blocks)
    codes = _bits(blocks[:, 48:], 4) | _bits(blocks[:, 16:48], 1) << 4
    return scales * codes.astype(np.float32) - minima


def _q6_k(blocks: Bytes) -> Floats:
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    codes = _bits(blocks[:, :128], 4, 64) | _bits(blocks[:, 128:192], 2) << 4
    return _by_group(scales, 16) * (codes - 32).astype(np.float32)


def _iq4_xs(blocks: Bytes) -> Floats:
    low = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=2).reshape(len(blocks), 8)
    halves = np.ascontiguousarray(blocks[:, 2:4]).view(np.uint16).astype(np.int64)
    high = halves >> np.arange(0, 16, 2) & 3
    scales = _half(blocks, 0) * ((low | high << 4) - 32).astype(np.float32)
    codes = _bits(blocks[:, 8:], 4, 16)
    return _by_group(scales, 32) * np.array(IQ4, np.float32)[codes]
