"""A runner's LoRA adapters: read, packed as the runner's matrices are, and put into its table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lmi_core.adapters.adapter import Adapter, AdapterPart, read_adapter
from lmi_core.models.loader import LoadedModel
from lmi_core.models.lora_linears import OwnLinear, linear_shapes, own_linears
from lmi_core.models.slices import WHOLE, Slicing
from lmi_core.models.spec import DecoderSpec
from lmi_core.models.weights import WeightPacker
from lmi_core.ops.operands import LinearWeight, LoraTable
from lmi_core.weights.formats import FloatArray


@dataclass(frozen=True, slots=True)
class PackedLora:
    """An adapter as ``LoraTable.set`` takes it."""

    linears: list[list[tuple[LinearWeight, LinearWeight, int]]]
    other_bytes: int = 0
    """Of what other ranks have of it."""

    @property
    def num_bytes(self) -> int:
        parts = (part for parts in self.linears for part in parts)
        return sum(a.num_bytes + b.num_bytes for a, b, _ in parts) + self.other_bytes


class LoraStore:
    """Implements ``AdapterStore`` for a model whose linears add what ``table`` holds."""

    def __init__(
        self,
        model: LoadedModel,
        packer: WeightPacker,
        table: LoraTable,
        *,
        max_rank: int,
        rank_multiple: int = 1,
    ) -> None:
        """``rank_multiple``: adapters of other ranks get zeros up to the next of these."""
        self.table = table
        self._rank_multiple = rank_multiple
        self._spec, self._slicing, self._dtype = model.whole_spec, model.slicing, model.dtype
        self._packer = packer
        self._max_rank = max_rank

    def pack(self, path: Path) -> PackedLora:
        whole = read_adapter(path, self._spec, max_rank=self._max_rank)
        adapter = _own_slices(whole, self._spec, self._slicing)
        return PackedLora([[self._pack_part(part) for part in parts] for parts in adapter])

    def _pack_part(self, part: AdapterPart) -> tuple[LinearWeight, LinearWeight, int]:
        a, b = part.a, part.b
        if missing := -len(a) % self._rank_multiple:
            a, b = np.pad(a, ((0, missing), (0, 0))), np.pad(b, ((0, 0), (0, missing)))
        return self._pack(a), self._pack(b), part.first_output

    def set(self, slot: int, adapter: PackedLora | None) -> None:
        if adapter is None:
            self.table.clear(slot)
        else:
            self.table.set(slot, adapter.linears)

    def _pack(self, matrix: FloatArray) -> LinearWeight:
        return self._packer.pack([matrix], format=self._dtype, gated=False)


def _own_slices(adapter: Adapter, spec: DecoderSpec, slicing: Slicing) -> Adapter:
    """What one rank of the model of ``spec`` has of an adapter, by its own linears: B's rows where
    outputs are cut, A's columns where inputs are, so that the ranks' sums have what it adds."""
    if slicing == WHOLE:
        return adapter
    own: Adapter = [[] for _ in linear_shapes(spec, slicing)]
    for linear in own_linears(spec, slicing):
        parts = (_own_part(part, linear) for part in adapter[linear.whole_id])
        own[linear.linear_id] = [part for part in parts if part is not None]
    return own


def _own_part(part: AdapterPart, linear: OwnLinear) -> AdapterPart | None:
    """None: it adds to none of the rank's outputs."""
    if linear.inputs is not None:
        return AdapterPart(
            np.ascontiguousarray(part.a[:, slice(*linear.inputs)]), part.b, part.first_output
        )
    if linear.rows is None:
        return part
    end = part.first_output + len(part.b)
    [places] = np.nonzero((linear.rows >= part.first_output) & (linear.rows < end))
    if not places.size:
        return None
    # A part is of queries, keys, values, gate, up, or all outputs: what a rank has lies together.
    b = np.ascontiguousarray(part.b[linear.rows[places] - part.first_output])
    return AdapterPart(part.a, b, int(places[0]))
