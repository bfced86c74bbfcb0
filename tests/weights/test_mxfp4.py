"""Matrices of MXFP4."""

from __future__ import annotations

import numpy as np

from lmi_core.weights.mxfp4 import decode_mxfp4


def test_numbers_are_magnitudes_signs_and_powers_of_two() -> None:
    codes = np.arange(32) % 16
    blocks = (codes[::2] | codes[1::2] << 4).astype(np.uint8).reshape(1, 1, 16)
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values = np.array([*positive, *(-x for x in positive)] * 2, np.float32)
    for scale in (127, 120, 1, 250):
        bits = decode_mxfp4(blocks, np.array([[scale]], np.uint8))
        decoded = (bits.astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_array_equal(decoded[0], values * np.float32(2.0 ** (scale - 127)))
    assert np.isnan(
        (decode_mxfp4(blocks, np.array([[255]], np.uint8)).astype(np.uint32) << 16).view(np.float32)
    ).all()


def test_blocks_follow_each_other() -> None:
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (5, 3, 16), dtype=np.uint8)
    scales = random.integers(100, 140, (5, 3), dtype=np.uint8)
    whole = decode_mxfp4(blocks, scales)
    assert whole.shape == (5, 96)
    for row in range(5):
        for block in range(3):
            part = decode_mxfp4(
                blocks[row : row + 1, block : block + 1], scales[row : row + 1, block : block + 1]
            )
            np.testing.assert_array_equal(whole[row, 32 * block : 32 * (block + 1)], part[0])
