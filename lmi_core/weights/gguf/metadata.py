"""A GGUF file's metadata below its architecture's name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lmi_core.errors import ModelError
from lmi_core.weights.gguf.file import GgufFile, fault

LAYER = "blk.0."


@dataclass(frozen=True, slots=True)
class Metadata:
    """A file's metadata with checked access."""

    file: GgufFile
    architecture: str
    asked: set[str] = field(default_factory=set)
    """Keys that were read."""
    notes: list[str] = field(default_factory=list)
    """What is read otherwise than the file says, for people."""

    def get(self, key: str) -> Any:
        """A number or a string of the architecture; a list of layers' where all are alike."""
        name = f"{self.architecture}.{key}"
        self.asked.add(key)
        value = self.file.metadata.get(name)
        if isinstance(value, np.ndarray):
            if not len(value) or (value != value[0]).any():
                raise ModelError(
                    f"{self.file.path}: {name} differs by layer, which is not supported here",
                    field=self.file.path.name,
                )
            value = value[0].item()
        if isinstance(value, list):
            raise fault(self.file.path, f"has a list of strings as {name}")
        return value

    def number(self, key: str) -> Any:
        """As ``get``, an int or a float."""
        value = self.get(key)
        if value is not None and (isinstance(value, str) or not math.isfinite(value)):
            name = f"{self.architecture}.{key}"
            raise fault(self.file.path, f"has {str(value)[:40]!r} as {name}, which isn't a number")
        return value

    def numbers(self, keys: Mapping[str, str]) -> dict[str, Any]:
        """By our names, with the file's of each; None for those that it doesn't have."""
        return {ours: self.number(key) for ours, key in keys.items()}

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def has_in_layers(self, tensor: str) -> bool:
        return self.has(LAYER + tensor)
