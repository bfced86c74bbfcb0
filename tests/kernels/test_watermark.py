"""The tokens that a watermark favours, and that sampling favours them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lmi_core import _native
from tests.kernels.paged import VECTORS
from tests.kernels.sampling_case import sample


@pytest.mark.parametrize("vocab_size", [1, 2, 50, 32000, 151_937])
@pytest.mark.parametrize("gamma", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("previous_id", [0, 1, 277, 151_000])
def test_the_permutation_is_that_of_pytorch_on_a_cpu(
    vocab_size: int, gamma: float, previous_id: int
) -> None:
    generator = torch.Generator().manual_seed(15485863 * previous_id)
    order = torch.randperm(vocab_size, generator=generator)
    expected = order[: int(vocab_size * gamma)].numpy()
    got = _native.favoured_tokens(previous_id, gamma, vocab_size)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("level", VECTORS)
def test_favoured_tokens_get_the_bias_before_penalties(level: str) -> None:
    """The token before is 0 here: the kernel has no step to read it from."""
    vocab_size = 500
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((40, vocab_size)).astype(np.float32)
    row = {"watermark_gamma": 0.25, "watermark_delta": 3.0, "repetition_penalty": 1.5}
    seen = [(int(i), 0) for i in rng.choice(vocab_size, 60, replace=False)]
    result = sample(level, logits, [{**row, "seen": seen}], sampling_rows=np.zeros(40))
    expected = logits.copy()
    expected[:, _native.favoured_tokens(0, 0.25, vocab_size)] += np.float32(3.0)
    ids = [i for i, _ in seen]
    penalised = expected[:, ids]
    expected[:, ids] = np.where(penalised > 0, penalised / 1.5, penalised * 1.5)
    np.testing.assert_array_equal(result["ids"], expected.argmax(-1))
    assert (result["ids"] != logits.argmax(-1)).any()


@pytest.mark.parametrize("level", VECTORS)
def test_a_bias_and_a_watermark_are_one_summand(level: str) -> None:
    """As every other sampler has them: added one by one, they would leave nothing of a logit."""
    row = {"watermark_gamma": 1.0, "watermark_delta": 1e8, "logit_bias": [(0, -1e8), (1, -1e8)]}
    assert sample(level, np.array([[0.5, 1.0]], np.float32), [row])["ids"].tolist() == [1]
