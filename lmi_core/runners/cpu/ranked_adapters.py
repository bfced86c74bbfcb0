"""LoRA adapters of a model that ranks compute: each packs what its slices take, and they are in the
same slots of all."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from lmi_core import _native
from lmi_core.adapters.store import LoraStore, PackedLora
from lmi_core.models.lora_linears import linear_shapes
from lmi_core.ops.cpu import NativeWeights

if TYPE_CHECKING:
    from lmi_core.models.loader import LoadedModel
    from lmi_core.ops.operands import LoraTable
    from lmi_core.settings.engine_config import EngineConfig
    from lmi_core.settings.lora_config import LoraConfig


@dataclass(frozen=True, slots=True, weakref_slot=True)
class RankedLora(PackedLora):
    """Rank 0's part of an adapter, which the others keep under ``key`` as long as this is there."""

    key: int = 0


class OtherRanks(Protocol):
    """Of a model, as rank 0 has them."""

    def ask(self, name: str, *arguments: Any) -> list[Future[Any]]:
        """Have each do something; what it returns. Does not wait."""
        ...

    def order(self, name: str, *arguments: Any) -> list[Future[Any]]:
        """The same, before steps that are submitted from now on."""
        ...


class RankedAdapters:
    """Implements ``AdapterStore`` for all ranks of a model; ``own``: rank 0's."""

    def __init__(self, own: LoraStore, ranks: OtherRanks) -> None:
        self._own = own
        self._ranks = ranks
        self._keys = itertools.count()
        self._dropped: deque[int] = deque()

    def pack(self, path: Path) -> RankedLora:
        key = next(self._keys)
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        answers = self._ranks.ask("pack_adapter", key, path, dropped)
        try:
            own = self._own.pack(path)
            packed = RankedLora(own.linears, sum(answer.result() for answer in answers), key)
        except BaseException:
            wait(answers)
            self._dropped.append(key)
            raise
        weakref.finalize(packed, self._dropped.append, key)
        return packed

    def set(self, slot: int, adapter: PackedLora | None) -> None:
        self._own.set(slot, adapter)
        key = None if adapter is None else cast(RankedLora, adapter).key
        self._ranks.order("set_adapter", slot, key)


def lora_store(config: EngineConfig, lora: LoraConfig, model: LoadedModel) -> LoraStore:
    """One rank's, of all of a model or its slice of it."""
    shapes = linear_shapes(model.whole_spec, model.slicing)
    table = cast("LoraTable", _native.LoraTable(shapes, dtype=model.dtype))
    packer = NativeWeights(config.instruction_set, num_threads=1)
    return LoraStore(model, packer, table, max_rank=lora.max_rank)
