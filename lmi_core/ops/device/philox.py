"""Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): the random
number of a token depends on (seed, choice, position) only, alike on every device."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def uniform(
    seed: npt.NDArray[np.uint64], choice: npt.NDArray[np.int32], position: npt.NDArray[np.int32]
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits per element."""
    zero = np.zeros(seed.shape, np.uint64)
    counter = [position.astype(np.uint64) & _LOW, choice.astype(np.uint64) & _LOW, zero, zero]
    key_low, key_high = seed & _LOW, seed >> _HALF
    for _ in range(10):
        a = np.uint64(0xD2511F53) * counter[0]
        b = np.uint64(0xCD9E8D57) * counter[2]
        counter = [
            (b >> _HALF) ^ counter[1] ^ key_low,
            b & _LOW,
            (a >> _HALF) ^ counter[3] ^ key_high,
            a & _LOW,
        ]
        key_low = (key_low + np.uint64(0x9E3779B9)) & _LOW
        key_high = (key_high + np.uint64(0xBB67AE85)) & _LOW
    bits = (counter[0] << _HALF | counter[1]) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53
