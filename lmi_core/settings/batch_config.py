"""Where the Batch API keeps its files, and how much it does at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """``batch_dir``, ``batch_dir_size`` and ``batch_concurrency``."""

    directory: Path
    max_bytes: int = 1 << 30
    """Of a tenant's files together."""
    concurrency: int = 8
    """Requests at once, of all batches."""
