"""The faults of a file's or a checkpoint's tensors as one error."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lmi_core.errors import ModelError

_MAX_SHOWN = 20


def tensor_faults(path: Path, what: str, faults: Sequence[str], *, field: str) -> ModelError:
    """``what`` is wrong with tensors, each of which has a line; the first ones are shown."""
    shown = list(faults[:_MAX_SHOWN])
    if len(faults) > len(shown):
        shown.append(f"and {len(faults) - len(shown)} more")
    lines = "\n  ".join(shown)
    return ModelError(f"{path}: {len(faults)} of the tensors {what}:\n  {lines}", field=field)
