"""LoRA adapters that PEFT adds to a Transformers model's layers, for each sequence its own."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lmi_core.adapters.adapter_config import read_adapter_config
from lmi_core.adapters.text_models import check_peft
from lmi_core.errors import ModelError

if TYPE_CHECKING:
    from lmi_core import _native

_BASE = "__base__"
"""What PEFT calls no adapter, in a batch of several."""


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter in the model's layers, by PEFT's name of it."""

    name: str
    num_bytes: int


class PeftAdapters:
    """Implements ``AdapterStore``. ``lock`` is held while the model runs, so that its layers don't
    change meanwhile."""

    def __init__(self, model: Any, *, max_rank: int) -> None:
        """Raises MissingExtraError without the library."""
        check_peft()
        self.lock = threading.Lock()
        self._model = model
        self._max_rank = max_rank
        self._serials = itertools.count()
        self._hooked: set[int] = set()
        self._names: dict[int, str] = {}
        """By slot."""
        self._unused: list[str] = []
        self._batch: list[str] = []
        """Of each sequence of the call that is made."""

    def pack(self, path: Path) -> LoadedAdapter:
        """Add the adapter to the layers, where nobody uses it yet. Raises ModelError."""
        config = read_adapter_config(path)
        rank = max((config.rank, *config.ranks.values()))
        if rank > self._max_rank:
            raise ModelError(
                f"{config.path} has rank {rank}; allowed are up to {self._max_rank} "
                "(max_lora_rank)",
                field="r",
            )
        name = f"adapter{next(self._serials)}"
        with self.lock:
            try:
                self._model.load_adapter(str(path), adapter_name=name)
            except Exception as error:  # the library raises every kind
                reason = " ".join(str(error).split())[:400]
                raise ModelError(f"{path}: PEFT can't load the adapter: {reason}") from error
            self._hook()
        num_bytes = sum(file.stat().st_size for file in path.glob("adapter_model.*"))
        return LoadedAdapter(name, num_bytes)

    def set(self, slot: int, adapter: LoadedAdapter | None) -> None:
        if adapter is None:
            self._unused.append(self._names.pop(slot))
        else:
            self._names[slot] = adapter.name

    def names_of(self, step: _native.Step) -> dict[int, str]:
        """PEFT's names by row of the block tables, for the sequences of a step that have adapters;
        in the thread that fills it."""
        seqs, table_rows = np.array(step.view("first_rows")), np.array(step.view("table_rows"))
        names: dict[int, str] = {}
        for first, count, slot in zip(
            *(
                step.view(f"adapter_{name}").tolist()
                for name in ("first_rows", "num_rows", "slots")
            ),
            strict=True,
        ):
            rows = table_rows[(first <= seqs) & (seqs < first + count)].tolist()
            names |= dict.fromkeys(rows, self._names[slot])
        return names

    def use(self, rows: Iterable[int], names: Mapping[int, str]) -> None:
        """Say which adapters the sequences of the next call have; ``rows`` are in its order."""
        self._batch = [names.get(row, _BASE) for row in rows]

    def remove_unused(self) -> None:
        """Take adapters out of the layers that no step refers to any more; ``lock`` is held.

        By PEFT itself, since Transformers 5.24 wants a release of it for this that isn't out.
        """
        from peft.functional import delete_adapter

        while self._unused:
            name = self._unused.pop()
            delete_adapter(self._model, adapter_name=name, prefix="lora_")
            del self._model.peft_config[name]

    def _hook(self) -> None:
        for module in self._model.modules():
            if hasattr(module, "lora_A") and id(module) not in self._hooked:
                self._hooked.add(id(module))
                module.register_forward_pre_hook(self._name_rows, with_kwargs=True)

    def _name_rows(
        self, module: Any, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A layer's input has a row for each sequence, or one for each of their tokens."""
        num_rows = inputs[0].shape[0] // max(1, len(self._batch))
        names = [name for name in self._batch for _ in range(num_rows)]
        return inputs, {**named, "adapter_names": names}
