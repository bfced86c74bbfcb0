"""An ordered list of keys and values, in which a key may repeat."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class PairList:
    """Content items of a request or an answer."""

    def __init__(self, pairs: Iterable[tuple[str | None, bytes]] = ()) -> None:
        self.keys: list[str | None] = []
        self.values: list[bytes] = []
        for key, value in pairs:
            self.add(key, value)

    def add(self, key: str | None, value: bytes) -> None:
        self.keys.append(key)
        self.values.append(value)

    def size(self) -> int:
        return len(self.keys)

    def is_empty(self) -> bool:
        return not self.keys

    def key_at(self, index: int) -> str | None:
        return self.keys[index]

    def value_at(self, index: int) -> bytes:
        return self.values[index]

    def contains_key(self, key: str) -> bool:
        return key in self.keys

    def get(self, key: str) -> bytes:
        """The first value of ``key``; KeyError when there is none."""
        if key not in self.keys:
            raise KeyError(key)
        return self.values[self.keys.index(key)]

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[tuple[str | None, bytes]]:
        return iter(zip(self.keys, self.values, strict=True))
