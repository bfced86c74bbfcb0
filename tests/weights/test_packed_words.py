"""Words of codes, by the vectors of the layouts' descriptions."""

from __future__ import annotations

import numpy as np
import pytest

from lmi_core.weights.quantized.words import unpack_awq, unpack_columns, unpack_rows


def words(*values: int) -> np.ndarray:
    return np.array([values], np.uint32).view(np.int32)


def test_the_first_code_is_in_the_lowest_bits() -> None:
    np.testing.assert_array_equal(unpack_rows(words(0x76543210, 0xFEDCBA98), 4)[0], range(16))
    np.testing.assert_array_equal(
        unpack_rows(words(0x03020100, 0xFF800504), 8)[0, -4:], [4, 5, 128, 255]
    )


@pytest.mark.parametrize("num_bits", [4, 8])
def test_columns_are_rows_of_the_transposed(num_bits: int) -> None:
    random = np.random.default_rng(0).integers(-(2**31), 2**31, (3, 5), dtype=np.int32)
    codes = unpack_columns(random, num_bits)
    assert codes.shape == (5, 3 * 32 // num_bits)
    np.testing.assert_array_equal(codes[2], unpack_rows(random[:, 2:3].T, num_bits)[0])


def test_awq_interleaves_columns() -> None:
    np.testing.assert_array_equal(unpack_awq(words(0x75316420))[:, 0], range(8))
    codes = unpack_awq(np.concatenate([words(0x75316420, 0xFDB9ECA8), words(0, 0x11111111)]))
    np.testing.assert_array_equal(codes[:, 0], range(16))
    np.testing.assert_array_equal(codes[:, 1], [0] * 8 + [1] * 8)
