"""Whether a text has the watermark that requests ask for (Kirchenbauer et al. 2023)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from lmi_core import _native


def watermark_score(token_ids: Sequence[int], vocab_size: int, gamma: float = 0.5) -> float:
    """By how many standard deviations more tokens are favoured by the ones before them than chance
    would have it: the paper's z. ``token_ids``: at least two, from the last one of the prompt on;
    ``vocab_size``: of the model's logits; ``gamma``: as the text was generated with."""
    num_favoured = sum(
        token_id in _native.favoured_tokens(previous_id, gamma, vocab_size)
        for previous_id, token_id in pairwise(token_ids)
    )
    count = len(token_ids) - 1
    return (num_favoured - gamma * count) / math.sqrt(count * gamma * (1 - gamma))
