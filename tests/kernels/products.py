"""What the products of quantised weights with rows that are quantised, too, are compared with."""

import numpy as np

from lmi_core import _native

kernels = _native.kernels


def assert_products(level, x, weight, read_rows):
    """Sums of whole numbers are exact; ``read_rows`` gives (whole numbers, scales, ...) of rows."""
    w = weight.unpack().astype(np.float64)
    rows = kernels.quantize_rows(level, x, group_size=weight.group_size)
    q, scales, _ = read_rows(rows, x.shape[1], weight.group_size)
    rounded = q * scales[:, None].astype(np.float64)
    y = kernels.linear(level, x, weight)
    bound = 1e-6 * (np.abs(rounded) @ np.abs(w).T) + 1e-9
    assert np.all(np.abs(y - rounded @ w.T) <= bound)


def assert_same_bits(level, x, weight, parts, **options):
    """The same of each slice of rows in ``parts``, by whatever threads, as of all rows."""
    everything = kernels.linear(level, x, weight, **options)
    for part in parts:
        for num_threads, stride in ((1, 1), (2, 7), (8, 3), (64, 5)):
            y = kernels.linear(
                level, x[part], weight, num_threads=num_threads, stride=stride, **options
            )
            assert np.array_equal(y, everything[part])
