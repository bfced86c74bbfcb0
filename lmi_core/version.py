"""The one place the version is written, and the least versions of others."""

from __future__ import annotations

import re

__version__ = "0.1.0"

LEAST_TORCH = (2, 8)
"""Of the ops on GPUs: ``torch.mm`` has ``out_dtype`` since then."""
LEAST_LLGUIDANCE = (1, 8)
"""Of grammars: several end-of-sequence ids since 1.7, bounded blanks in any JSON since 1.8."""


def torch_too_old(version: str) -> str:
    """The objection to a torch older than LEAST_TORCH; empty where it isn't."""
    return _too_old("torch", version, LEAST_TORCH, "our ops work", "cuda")


def llguidance_too_old(version: str) -> str:
    """The same of llguidance and LEAST_LLGUIDANCE."""
    return _too_old(
        "llguidance", version, LEAST_LLGUIDANCE, "structured output works", "structured"
    )


def _too_old(name: str, version: str, least: tuple[int, int], works: str, extra: str) -> str:
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) >= least:
        return ""
    return (
        f"{name} {version} here is older than {'.'.join(map(str, least))}, the least that {works} "
        f"with: pip install --upgrade 'lmi-core[{extra}]'"
    )
