"""Buckets of distances between tokens (arXiv 1910.10683): exact ones, then by their logarithm."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lmi_core.models.spec import AttentionSpec

_LANES = 16
"""What the kernel reads beyond the longest distance."""


def relative_buckets(spec: AttentionSpec, max_length: int) -> npt.NDArray[np.int64]:
    """The bucket of each distance, the key's position less the query's, from -n to n - 1, with n =
    ``max_length`` + 16; those of later keys are the upper half."""
    span = max_length + _LANES
    distances = np.arange(-span, span)
    num_buckets = spec.relative_buckets // 2
    num_exact = num_buckets // 2
    far = np.maximum(np.abs(distances), num_exact).astype(np.float32)
    steps = np.log(far / num_exact) / np.float32(np.log(spec.relative_distance / num_exact))
    logarithmic = num_exact + (steps * (num_buckets - num_exact)).astype(np.int64)
    bucket: npt.NDArray[np.int64] = np.where(
        np.abs(distances) < num_exact,
        np.abs(distances),
        np.minimum(logarithmic, num_buckets - 1),
    )
    bucket += num_buckets * (distances > 0)
    return bucket
