"""Rows and matrices of a mixture's experts, as products of all of them take them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmi_core.ops.device.packed_weight import PackedWeight
from lmi_core.ops.device.torch_weights import DeviceWeight
from lmi_core.ops.operands import LinearWeight


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """A row for each expert of each token, by ascending expert, then token; int32, on the
    device."""

    token_rows: Tensor
    """[R]: of each row."""
    places: Tensor
    """[T, top_k]: the row of each of a token's experts."""
    first_rows: Tensor
    """[experts + 1]: of each expert."""


def heads_of_rows(num_rows: int, num_heads: int, device: torch.device) -> ExpertRows:
    """Of rows that have every head, one after the other."""
    numbers = torch.arange(num_rows * num_heads, dtype=torch.int32, device=device)
    places = numbers.view(num_heads, num_rows).t()
    firsts = torch.arange(num_heads + 1, dtype=torch.int32, device=device) * num_rows
    return ExpertRows(numbers.view(num_rows, num_heads).t().flatten(), places, firsts)


class ExpertTable:
    """Matrices of one shape."""

    def __init__(
        self,
        experts: Sequence[LinearWeight],
        multiply: Callable[[int, Tensor, Tensor | None], Tensor],
    ) -> None:
        """``multiply``: an expert's rows by its matrix, with a bias."""
        self.experts = experts
        self.multiply = multiply
        stored = [_stored(weight) for weight in experts]
        addresses = [tensor.data_ptr() for tensor in stored]
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=stored[0].device)
        """Of the matrices, which must outlive this."""
        self.are_alike = len({_form(weight) for weight in experts}) == 1
        """Whether one kernel can multiply by all."""


def _stored(weight: LinearWeight) -> Tensor:
    if isinstance(weight, PackedWeight):
        return weight.panels
    assert isinstance(weight, DeviceWeight)
    return weight.matrix


def _form(weight: LinearWeight) -> tuple[object, ...]:
    shape = (weight.num_outputs, weight.num_inputs, weight.row_format)
    if isinstance(weight, PackedWeight):
        return (*shape, weight.format, weight.group_size, weight.is_gated)
    return (*shape, _stored(weight).dtype)
