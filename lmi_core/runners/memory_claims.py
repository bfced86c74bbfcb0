"""What the engines of this process have taken of its memory, so that none counts it as free."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_core.runners.cpu.memory_needs import Estimate


class MemoryClaims:
    """Bytes by engine: its weights, and its KV cache to the full size that it may grow to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_bytes: dict[int, int] = {}

    def others_bytes(self, owner: object) -> int:
        """What all but ``owner`` have taken."""
        with self._lock:
            return self._others_bytes(owner)

    def claim(self, owner: object, num_bytes: int) -> None:
        """Count ``num_bytes`` as taken until ``owner`` releases them."""
        with self._lock:
            self._num_bytes[id(owner)] = num_bytes

    def claim_checked(self, owner: object, check: Callable[[int], Estimate]) -> Estimate:
        """As ``claim``, of what ``check`` returns for the bytes that others have, who take none
        between its look and the claim; returns it. What it raises changes nothing."""
        with self._lock:
            needs = check(self._others_bytes(owner))
            self._num_bytes[id(owner)] = needs.total
            return needs

    def release(self, owner: object) -> None:
        with self._lock:
            self._num_bytes.pop(id(owner), None)

    def _others_bytes(self, owner: object) -> int:
        return sum(num for key, num in self._num_bytes.items() if key != id(owner))


HOST_MEMORY = MemoryClaims()
"""Main memory; a device's own driver knows what is free there."""
