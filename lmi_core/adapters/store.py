"""A runner's LoRA adapters: read, packed as the runner's matrices are, and put into its table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lmi_core.adapters.adapter import read_adapter
from lmi_core.adapters.adapter_slices import own_slices
from lmi_core.models.loader import LoadedModel
from lmi_core.models.weights import WeightBackend
from lmi_core.ops.graph import LinearWeight, LoraTable
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
        self, model: LoadedModel, backend: WeightBackend, table: LoraTable, *, max_rank: int
    ) -> None:
        self.table = table
        self._spec, self._slicing, self._dtype = model.whole_spec, model.slicing, model.dtype
        self._backend = backend
        self._max_rank = max_rank

    def pack(self, path: Path) -> PackedLora:
        whole = read_adapter(path, self._spec, max_rank=self._max_rank)
        adapter = own_slices(whole, self._spec, self._slicing)
        return PackedLora(
            [
                [(self._pack(part.a), self._pack(part.b), part.first_output) for part in parts]
                for parts in adapter
            ]
        )

    def set(self, slot: int, adapter: PackedLora | None) -> None:
        if adapter is None:
            self.table.clear(slot)
        else:
            self.table.set(slot, adapter.linears)

    def _pack(self, matrix: FloatArray) -> LinearWeight:
        return self._backend.pack([matrix], format=self._dtype, gated=False)
