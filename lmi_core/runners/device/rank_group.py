"""The ranks of a model on torch devices, as one of them meets the others: by torch.distributed."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

_API: Any = distributed
"""Whose stubs don't tell of groups that aren't the process' own."""
_TIMEOUT = timedelta(seconds=300)
"""Of a meeting; a rank that ends is noticed at once."""


class GlooGroup:
    """Implements ``Ranks`` of ``ops/device/ranked_graph.py`` on one machine's CPU. A group by
    itself: no state of the process has to do with it, which may have several."""

    def __init__(self, place: Path, rank: int, num_ranks: int) -> None:
        """``place``: a file of this group alone; blocking, until all ranks are there."""
        self._num_ranks = num_ranks
        gloo = _API.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = _TIMEOUT
        store = _API.FileStore(str(place), num_ranks)
        self._group = gloo(store, rank, num_ranks, options)

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
