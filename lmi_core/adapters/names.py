"""The names of registered LoRA adapters, whoever computes with them."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from lmi_core.errors import UserError
from lmi_core.settings.lora_config import check_adapter_name

T = TypeVar("T")


class AdapterNames(Generic[T]):
    """What each name stands for, in order of registration. Used in the thread of one loop."""

    def __init__(self) -> None:
        self._adapters: dict[str, T] = {}
        self._claimed: set[str] = set()

    def items(self) -> ItemsView[str, T]:
        return self._adapters.items()

    def find(self, name: str) -> T:
        """Raises UserError for a name that isn't registered."""
        if name not in self._adapters:
            names = ", ".join(self._adapters) or "none"
            raise UserError(
                f"Adapter {name} is not registered; registered are {names}", field="adapter"
            )
        return self._adapters[name]

    @contextmanager
    def claim(self, name: str) -> Iterator[None]:
        """Keep a name for an adapter that is being loaded. Raises UserError for what is no name,
        and for one that is registered or claimed."""
        check_adapter_name(name)
        if name in self._adapters or name in self._claimed:
            raise UserError(f"Adapter {name} is registered already", field="adapter")
        self._claimed.add(name)
        try:
            yield
        finally:
            self._claimed.remove(name)

    def add(self, name: str, adapter: T) -> None:
        self._adapters[name] = adapter

    def remove(self, name: str) -> T:
        """Raises UserError for a name that isn't registered."""
        adapter = self.find(name)
        del self._adapters[name]
        return adapter
