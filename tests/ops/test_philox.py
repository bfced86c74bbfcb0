"""The random numbers of torch devices' samplers."""

from __future__ import annotations

import numpy as np

from lmi_core.ops.device import philox


def test_known_block() -> None:
    """The published first vector of Philox 4x32-10, zero key and counter: 6627e8d5 e169c58d ..."""
    zero = np.zeros(1, np.int32)
    (u,) = philox.uniform(np.zeros(1, np.uint64), zero, zero)
    assert u == (0x6627E8D5E169C58D >> 11) * 2.0**-53


def test_seed_choice_and_position_matter() -> None:
    seeds = np.array([1, 1, 1, 2, 1 << 63], np.uint64)
    choices = np.array([0, 1, 0, 0, 0], np.int32)
    positions = np.array([5, 5, 6, 5, 5], np.int32)
    numbers = philox.uniform(seeds, choices, positions)
    assert len(set(numbers.tolist())) == 5
    assert ((numbers >= 0) & (numbers < 1)).all()
