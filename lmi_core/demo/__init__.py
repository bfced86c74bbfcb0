"""The embedded demo model: its weights, and the generator and scripts that produced them.

Only `MODEL_DIR` is needed to serve it. Start reading at `corpus.py` (what it learns from), then
`train.py` (how) and `evaluate.py` (what it reached); `card.md` has the figures.
"""

from __future__ import annotations

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
"""The place of the checkpoint, in the layout of a Hugging Face model directory."""

__all__ = ["MODEL_DIR"]
