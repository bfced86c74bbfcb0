"""Heads that draft for a model, of every kind."""

from __future__ import annotations

from pathlib import Path

from lmi_core.models.eagle_head import EagleHead, find_eagle_head, has_eagle_head
from lmi_core.models.medusa_heads import MedusaHeads, find_medusa_heads, has_medusa_heads
from lmi_core.models.spec import DecoderSpec

DraftHeads = MedusaHeads | EagleHead


def has_draft_heads(directory: Path) -> bool:
    """Whether a directory holds heads, and no model."""
    return has_medusa_heads(directory) or has_eagle_head(directory)


def find_draft_heads(directory: Path, spec: DecoderSpec) -> DraftHeads:
    """Check all but the weights of the heads in ``directory``. Raises ModelError."""
    if has_medusa_heads(directory):
        return find_medusa_heads(directory, spec)
    return find_eagle_head(directory, spec)
