"""What a process holds, and whether it holds more with every request."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from pathlib import Path
from typing import NamedTuple

_NUM_WARM_ROUNDS = 15
_WARMING_BYTES = 32 << 20
_GROWTH_BYTES = 4 << 20
_MAX_BLOCKS_PER_REQUEST = 0.25


class Footprint(NamedTuple):
    """What the process holds between two rounds."""

    resident_bytes: int
    num_blocks: int
    """Of Python's allocator: an object that every request leaves behind is one more each time."""


def footprint() -> Footprint:
    """Taken once garbage is collected and free memory given back."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Footprint(num_pages * resource.getpagesize(), sys.getallocatedblocks())


def growth_faults(rounds: list[Footprint], num_per_round: int) -> list[str]:
    """What is wrong with the footprints after each round. Caches fill and code warms up in the
    first rounds; from then on nothing may grow with the number of requests."""
    first, last = rounds[0], rounds[-1]
    num_rounds = len(rounds) - _NUM_WARM_ROUNDS
    if last.resident_bytes - first.resident_bytes > _WARMING_BYTES:
        return [f"memory grew from {first.resident_bytes} to {last.resident_bytes} bytes"]
    if num_rounds < _NUM_WARM_ROUNDS:
        return []
    faults = []
    warm = rounds[_NUM_WARM_ROUNDS - 1]
    growth_bytes = last.resident_bytes - warm.resident_bytes
    if growth_bytes > _GROWTH_BYTES:
        faults.append(f"memory grew by {growth_bytes} bytes in {num_rounds} rounds, once warm")
    num_per_request = (last.num_blocks - warm.num_blocks) / (num_rounds * num_per_round)
    if num_per_request > _MAX_BLOCKS_PER_REQUEST:
        faults.append(f"a request leaves {num_per_request:.2f} blocks of memory behind, once warm")
    return faults
