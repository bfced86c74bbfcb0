"""LoRA adapters of steps that C++ launches."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from torch import Tensor

from lmi_core.adapters.store import LoraStore, PackedLora
from lmi_core.ops.device.adapter_table import AdapterTable
from lmi_core.ops.device.step_list import StepList


class StepListAdapters:
    """Implements ``AdapterStore``: those of ``store``, by which kernels of ``steps`` find them."""

    def __init__(self, store: LoraStore, steps: StepList) -> None:
        self._store, self._steps = store, steps
        self._described: dict[int, Tensor] = {}

    def pack(self, path: Path) -> PackedLora:
        return self._store.pack(path)

    def set(self, slot: int, adapter: PackedLora | None) -> None:
        self._store.set(slot, adapter)
        if adapter is None:
            self._steps.set_adapter(slot, 0)
            del self._described[slot]
            return
        described = cast(AdapterTable, self._store.table).described(slot)
        self._steps.set_adapter(slot, described.data_ptr())
        self._described[slot] = described
