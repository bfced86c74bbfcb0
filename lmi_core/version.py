"""The one place the version is written, and the least version of torch."""

from __future__ import annotations

import re

__version__ = "0.1.0"

LEAST_TORCH = (2, 8)
"""Of the ops on GPUs: ``torch.mm`` has ``out_dtype`` since then."""


def torch_too_old(version: str) -> str:
    """The objection to a torch older than LEAST_TORCH; empty where it isn't."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) >= LEAST_TORCH:
        return ""
    least = ".".join(map(str, LEAST_TORCH))
    return (
        f"torch {version} here is older than {least}, the least that our ops work with: "
        "pip install --upgrade 'lmi-core[cuda]'"
    )
