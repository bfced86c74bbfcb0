"""The ranks of a model on torch devices, as one of them meets the others: by torch.distributed."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

_API: Any = distributed
"""Whose stubs don't tell of groups that aren't the process' own."""
_TIMEOUT = timedelta(seconds=300)
"""Of a meeting. That a rank has ended is noticed by gloo at once, and by NCCL never: whoever sees
it aborts the group."""


class TorchGroup:
    """Implements ``Ranks`` of ``ops/device/ranked_graph.py`` on one machine: by gloo on the CPU, by
    NCCL on GPUs. A group by itself: no state of the process has to do with it, which may have
    several."""

    def __init__(self, place: Path, rank: int, num_ranks: int, device: torch.device) -> None:
        """``place``: a file of this group alone; blocking, until all ranks are there."""
        self._num_ranks = num_ranks
        self._is_aborted = False
        store = _API.FileStore(str(place), num_ranks)
        if device.type == "cuda":
            nccl = _API.ProcessGroupNCCL
            options = nccl.Options()
            options._timeout = _TIMEOUT
            self._group = nccl(store, rank, num_ranks, options)
            return
        gloo = _API.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = _TIMEOUT
        self._group = gloo(store, rank, num_ranks, options)

    def abort(self) -> None:
        """In any thread: end what waits for others, for good. NCCL takes its time, in a thread."""
        if not self._is_aborted:
            self._is_aborted = True
            threading.Thread(target=self._group.abort, name="group-end", daemon=True).start()

    def close(self) -> None:
        """When no step is in flight, and the others' processes are gone."""
        self.abort()

    def gather(self, part: Tensor) -> list[Tensor]:
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self._num_ranks)]
        if part.numel():
            self._group.allgather([parts], [part]).wait()
        return parts

    def collect(self, x: Tensor) -> None:
        if x.numel():
            options = _API.ReduceOptions()
            options.rootRank = 0
            self._group.reduce([x], options).wait()
