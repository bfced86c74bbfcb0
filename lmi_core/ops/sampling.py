"""What a step gives: token ids sampled from logits, or a value as it is."""

from __future__ import annotations

from lmi_core.ops.graph import Handle


def output(x: Handle) -> None:
    """Keeps a value readable after the step."""
    x.graph.add("output", None, {"x": x})


def sample(logits: Handle) -> None:
    """fp32 [L, vocab]: sampled ids and log-probabilities go to the step's results."""
    logits.graph.add("sample", None, {"logits": logits})
