"""What the filters of torch's sampler keep, which sorts nothing, beside what sorting keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.kernels.sampling_case import FILTERS, filtered_probabilities, random_logits

torch = pytest.importorskip("torch", exc_type=ImportError)

from lmi_core.ops.kernels.torch_ops.sampling import kept_masses  # noqa: E402
from lmi_core.runners.device.widest_step import widest_sampling  # noqa: E402

NEUTRAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
NEUTRAL |= {"epsilon_cutoff": 0.0, "eta_cutoff": 0.0}


@pytest.mark.parametrize("vocab", [1, 2, 31, 300, 5003])
@pytest.mark.parametrize("filters", FILTERS)
def test_filters_keep_what_sorting_keeps(vocab: int, filters: dict[str, Any]) -> None:
    logits = random_logits(4, vocab, seed=vocab)
    logits[1] = np.round(logits[1])  # many equals
    logits[2, 1::2] = -np.inf
    settings = {
        name: np.full(4, value, np.int32 if name == "top_k" else np.float32)
        for name, value in {**NEUTRAL, **filters}.items()
    }
    inputs = replace(widest_sampling(4, 0), **settings)
    best = torch.from_numpy(logits.max(1, keepdims=True))
    masses = kept_masses(torch.from_numpy(logits), best, inputs, np.arange(4)).numpy()
    for row in range(4):
        p = filtered_probabilities(logits[row], **filters)
        # Masses below 2^-40 of the greatest are none.
        np.testing.assert_array_equal(masses[row] > 0, p > 2.0**-40 * p.max())
        np.testing.assert_allclose(masses[row] / masses[row].sum(), p, rtol=1e-4, atol=1e-9)
