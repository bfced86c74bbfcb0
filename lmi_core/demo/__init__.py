"""The embedded model; ``card.md`` says what it is, and ``bench/demo`` made it."""

from __future__ import annotations

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
"""The place of the checkpoint, in the layout of a Hugging Face model directory."""

__all__ = ["MODEL_DIR"]
