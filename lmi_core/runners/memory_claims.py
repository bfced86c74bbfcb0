"""What the engines of this process have taken of its memory, so that none counts it as free."""

from __future__ import annotations

import threading


class MemoryClaims:
    """Bytes by engine: its weights, and its KV cache to the full size that it may grow to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_bytes: dict[int, int] = {}

    @property
    def total_bytes(self) -> int:
        with self._lock:
            return sum(self._num_bytes.values())

    def of(self, owner: object) -> int:
        """What ``owner`` has taken."""
        with self._lock:
            return self._num_bytes.get(id(owner), 0)

    def claim(self, owner: object, num_bytes: int) -> None:
        """Count ``num_bytes`` as taken until ``owner`` releases them."""
        with self._lock:
            self._num_bytes[id(owner)] = num_bytes

    def release(self, owner: object) -> None:
        with self._lock:
            self._num_bytes.pop(id(owner), None)


HOST_MEMORY = MemoryClaims()
"""Main memory; a device's own driver knows what is free there."""
