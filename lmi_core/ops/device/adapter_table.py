"""LoRA adapters by slot on torch devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from lmi_core.ops.device.step_arrays import StepArrays
from lmi_core.ops.kernels.cuda import library
from lmi_core.ops.operands import LinearWeight

RANK_MULTIPLE = 8
"""Of adapters: the CUDA kernels read as many numbers at once."""


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

    def __init__(self, max_rank: int = 0) -> None:
        """``max_rank``: of all adapters, a multiple of RANK_MULTIPLE."""
        self.max_rank = max_rank
        self._adapters: dict[int, Sequence[Sequence[tuple[LinearWeight, LinearWeight, int]]]] = {}

    def set(
        self, slot: int, adapter: Sequence[Sequence[tuple[LinearWeight, LinearWeight, int]]]
    ) -> None:
        self._adapters[slot] = adapter

    def clear(self, slot: int) -> None:
        del self._adapters[slot]

    def described(self, slot: int) -> Tensor:
        """An adapter as kernels read it, on its own device: ``LmiLoraPart``s by linear id."""
        number_of = library.load().interface.numbers
        most, parts = number_of["MAX_LORA_PARTS"], library.load().interface.structs["LoraPart"]
        linears = self._adapters[slot]
        described = (parts * (most * len(linears)))()
        device = torch.device("cpu")
        for linear_id, linear in enumerate(linears):
            for number, (a, b, first_output) in enumerate(linear):
                device = _matrix(a).device
                described[linear_id * most + number] = parts(
                    a=_matrix(a).data_ptr(),
                    b=_matrix(b).data_ptr(),
                    rank=a.num_outputs,
                    first_output=first_output,
                    num_outputs=b.num_outputs,
                )
        return torch.frombuffer(described, dtype=torch.uint8).to(device, copy=True)

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
