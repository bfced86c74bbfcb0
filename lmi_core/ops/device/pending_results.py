"""A sampler's results on their way to the host."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lmi_core.ops.device.sampling_inputs import SamplingResults


class PendingResults:
    """What ``sample`` put onto the stream; the host needn't wait before it submits more."""

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
        self._host = packed
        self._event: torch.cuda.Event | None = None
        if packed.device.type == "cuda":
            self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> SamplingResults:
        """From any thread."""
        if self._event is not None:
            self._event.synchronize()
        return self._unpack(self._host.numpy())
