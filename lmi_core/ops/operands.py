"""What ops are given beside values: weights, tables, the KV cache and adapters, in a device's own
layout."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lmi_core.weights.block_matrix import BlockMatrix

Table = npt.NDArray[np.generic] | BlockMatrix
"""Rows by token, or by position."""


class LinearWeight(Protocol):
    """A weight matrix in a device's own layout."""

    @property
    def num_outputs(self) -> int: ...
    @property
    def num_inputs(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def row_format(self) -> Hashable | None:
        """How rows are quantised that are multiplied with it; None: they are not."""
        ...


@dataclass(frozen=True, slots=True)
class JoinedWeight:
    """Matrices whose outputs, one after the other, are those of one, each in its own format."""

    parts: tuple[LinearWeight, ...]

    @property
    def num_outputs(self) -> int:
        return sum(part.num_outputs for part in self.parts)

    @property
    def num_inputs(self) -> int:
        return self.parts[0].num_inputs

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def row_format(self) -> Hashable | None:
        """None also where parts take their rows in different ways."""
        formats = {part.row_format for part in self.parts}
        return formats.pop() if len(formats) == 1 else None


@dataclass(frozen=True, slots=True)
class SlicedWeight:
    """Matrices whose inputs, one after the other, are those of one, or of a rank's part of it."""

    slices: tuple[LinearWeight, ...]

    @property
    def num_outputs(self) -> int:
        return self.slices[0].num_outputs

    @property
    def num_inputs(self) -> int:
        return sum(part.num_inputs for part in self.slices)

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.slices)

    @property
    def row_format(self) -> None:
        """Each rounds its own inputs."""
        return None


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """Matrices of one shape, for devices that multiply expert by expert."""

    experts: tuple[LinearWeight, ...]
    row_format: Hashable | None = None

    @property
    def num_outputs(self) -> int:
        return self.experts[0].num_outputs

    @property
    def num_inputs(self) -> int:
        return self.experts[0].num_inputs

    @property
    def num_bytes(self) -> int:
        return sum(weight.num_bytes for weight in self.experts)


class KvCache(Protocol):
    """Paged keys and values of all layers, in a device's own layout."""

    @property
    def num_bytes(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


class LoraTable(Protocol):
    """LoRA adapters by slot, in a device's own layout: what steps' adapter slots refer to.

    A slot may be changed while steps run, if none of them refers to it.
    """

    def set(
        self, slot: int, adapter: Sequence[Sequence[tuple[LinearWeight, LinearWeight, int]]]
    ) -> None:
        """By linear id, the parts that the adapter adds to: A [rank, inputs], B [outputs, rank],
        both in the act dtype, and the first of the linear's outputs."""
        ...

    def clear(self, slot: int) -> None: ...
