"""What is kept of requests and their answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordConfig:
    """Where receipts go, how many of them, and how much they may take."""

    directory: Path
    share: float = 1.0
    """Of the requests, those that are kept: 0 to 1, drawn by chance."""
    max_bytes: int = 1 << 30
    max_files: int = 64
    """Of all files together; the oldest go when there would be more."""
    redact: bool = False
    """Keep how much was asked and answered, not what."""
