"""Arrays on their way to a device, of which weights are the most."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ROOM_BYTES = 16 << 20
NUM_ROOMS = 3
NUM_THREADS = 4


class _Room(NamedTuple):
    """What it holds is copied on when the event comes; None: at once."""

    values: Tensor
    copied: torch.cuda.Event | None


class StagedCopies:
    """Copies to a GPU through pinned memory, which its copy engine reads by itself: while it does,
    threads read the next part of a mapped file. From any thread."""

    def __init__(self, device: torch.device) -> None:
        is_pinned = device.type == "cuda"
        self._rooms = [
            _Room(
                torch.empty(ROOM_BYTES, dtype=torch.uint8, pin_memory=is_pinned),
                torch.cuda.Event() if is_pinned else None,  # type: ignore[no-untyped-call]
            )
            for _ in range(NUM_ROOMS)
        ]
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="lmi-staging")

    def copy(self, values: npt.NDArray[np.generic], target: Tensor) -> None:
        """``target``: contiguous, of as many bytes. The current stream has them when it comes to
        what follows; ``values`` aren't read any more."""
        source = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        flat = target.view(-1).view(torch.uint8)
        if len(source) != len(flat):
            raise ValueError(f"{len(source)} bytes for a tensor of {len(flat)}")
        with self._lock:
            rooms = itertools.cycle(self._rooms)
            for first in range(0, len(source), ROOM_BYTES):
                part = source[first : first + ROOM_BYTES]
                self._pass_on(next(rooms), part, flat[first : first + len(part)])

    def _pass_on(self, room: _Room, part: npt.NDArray[np.uint8], target: Tensor) -> None:
        if room.copied is not None:
            room.copied.synchronize()
        self._fill(room.values.numpy(), part)
        target.copy_(room.values[: len(part)], non_blocking=True)
        if room.copied is not None:
            room.copied.record(torch.cuda.current_stream(target.device))

    def _fill(self, room: npt.NDArray[np.uint8], part: npt.NDArray[np.uint8]) -> None:
        """By all threads: each page of a mapped file that is read first takes a fault."""
        size = -(-len(part) // NUM_THREADS)

        def copy(first: int) -> None:
            end = min(first + size, len(part))
            room[first:end] = part[first:end]

        list(self._threads.map(copy, range(0, len(part), max(size, 1))))
