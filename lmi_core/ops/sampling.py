"""From logits to token ids."""

from __future__ import annotations

from lmi_core.ops.recorder import Handle


def sample(logits: Handle) -> None:
    """fp32 [L, vocab]: sampled ids and log-probabilities go to the step's results."""
    logits.recorder.sample(logits)
