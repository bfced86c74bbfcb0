"""LoRA adapters by slot for graphs that Python executes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, cast

from torch import Tensor

from lmi_core.ops.device.step_arrays import StepArrays
from lmi_core.ops.graph import LinearWeight


class AdaptedPart(NamedTuple):
    """``rows`` of a step get B A x in ``outputs`` of a linear."""

    rows: slice
    outputs: slice
    a: Tensor
    b: Tensor


class _DenseWeight(Protocol):
    matrix: Tensor


class AdapterTable:
    """Implements ``LoraTable`` for weights that are one tensor each."""

    def __init__(self) -> None:
        self._adapters: dict[int, Sequence[Sequence[tuple[LinearWeight, LinearWeight, int]]]] = {}

    def set(
        self, slot: int, adapter: Sequence[Sequence[tuple[LinearWeight, LinearWeight, int]]]
    ) -> None:
        self._adapters[slot] = adapter

    def clear(self, slot: int) -> None:
        del self._adapters[slot]

    def parts(self, step: StepArrays, linear_id: int) -> Iterator[AdaptedPart]:
        """What the adapters of a step add to a linear."""
        runs = zip(step.adapter_first_rows, step.adapter_num_rows, step.adapter_slots, strict=True)
        for first, count, slot in runs:
            rows = slice(int(first), int(first + count))
            for a, b, first_output in self._adapters[int(slot)][linear_id]:
                outputs = slice(first_output, first_output + b.num_outputs)
                yield AdaptedPart(rows, outputs, _matrix(a), _matrix(b))


def _matrix(weight: LinearWeight) -> Tensor:
    return cast(_DenseWeight, weight).matrix
