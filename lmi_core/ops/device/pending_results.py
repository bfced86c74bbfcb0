"""A sampler's results on their way to the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lmi_core.ops.device.sampling_inputs import SamplingResults


class _Download:
    """A tensor on its way to the host, which needn't wait before it submits more."""

    def __init__(self, tensor: Tensor) -> None:
        self._host = tensor
        self._event: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> npt.NDArray[Any]:
        """From any thread."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.numpy()


class PendingRows:
    """fp32 rows that a step gives instead of tokens."""

    def __init__(self, rows: Tensor) -> None:
        self._download = _Download(rows)

    def wait(self) -> npt.NDArray[np.float32]:
        """From any thread."""
        return self._download.wait()


class PendingResults:
    """What ``sample`` put onto the stream."""

    def __init__(
        self,
        token_ids: Tensor,
        packed: Tensor,
        unpack: Callable[[npt.NDArray[np.int32]], SamplingResults],
    ) -> None:
        """``token_ids``: [L], on the device, for the next step. ``packed``: int32, all results,
        for ``unpack``."""
        self.token_ids = token_ids
        self._unpack = unpack
        self._download = _Download(packed)

    def wait(self) -> SamplingResults:
        """From any thread."""
        return self._unpack(self._download.wait())
