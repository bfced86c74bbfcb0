"""From logits to token ids."""

from __future__ import annotations

from lmi_core.ops.graph import Handle


def sample(logits: Handle) -> None:
    """fp32 [L, vocab]: sampled ids and log-probabilities go to the step's results."""
    logits.graph.add("sample", None, {"logits": logits})
