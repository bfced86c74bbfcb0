"""The runner of native CUDA kernels: C++ threads launch a recorded step list."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from lmi_core import _native
from lmi_core.runners.device.cuda_model import CudaModel, start_worker
from lmi_core.runners.device.step_list_adapters import StepListAdapters
from lmi_core.runners.step_memory import StepMemory

if TYPE_CHECKING:
    from lmi_core.models.loader import LoadedModel
    from lmi_core.runners.device.device_ranks import DeviceRanks
    from lmi_core.runners.runner import AdapterStore
    from lmi_core.settings.engine_config import EngineConfig

_log = logging.getLogger(__name__)


class CudaRunner:
    """Implements ``AheadRunner``: no Python runs in a step."""

    def __init__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        device: torch.device,
        chosen: Mapping[str, str],
        others_bytes: int = 0,
        ranks: DeviceRanks | None = None,
    ) -> None:
        """``chosen``: the implementation of every op. ``others_bytes``: what was allocated on the
        device before the weights. ``ranks``: the others that compute ``model``, of which this is
        rank 0. Raises NotNativeError if an op of the model has no native kernel, having changed
        nothing."""
        self.device, self._ranks = device, ranks
        self._model = CudaModel(config, model, device, chosen)
        group = None
        if ranks is None:
            self._model.start(others_bytes)
        else:
            group = ranks.start_list(self._model, others_bytes)
        self._steps, memory = self._model.steps, self._model.memory
        shared = StepMemory.of(config, self._model.sizes, memory.num_blocks)
        self.pool, self.block_tables = shared.pool, shared.block_tables
        self.sampling, self.steps = shared.sampling, shared.steps
        self._last_step = self.steps[0]
        info = self._model.cache.info(memory, self._model.measured, chosen, runs_ahead=True)
        self.adapters: AdapterStore | None = None
        if self._model.adapters is not None:
            self.adapters = StepListAdapters(self._model.adapters, self._steps.list)
        self.info = replace(
            info,
            has_adapters=self.adapters is not None,
            counts_ahead=True,
            has_scales_and_cutoffs=False,
        )
        self.completion_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._worker: _native.DeviceWorker | None = start_worker(self._steps, group)
        self._has_warned = False

    @property
    def is_lost(self) -> bool:
        return self._ranks is not None and self._ranks.is_lost

    def submit(self, step: _native.Step) -> None:
        assert self._worker is not None, "submit after close"
        self._worker.submit(step, self.completion_fd)
        self._last_step = step
        self._steps.list.library.log_notices()
        if not self._has_warned and self._worker.capture_error:
            self._has_warned = True
            _log.warning(
                "decode steps run kernel by kernel: capturing them failed: %s",
                self._worker.capture_error,
            )

    def submit_ahead(self, step: _native.Step, logit_rows: list[int]) -> None:
        step.follow(self._last_step, logit_rows)
        self.submit(step)

    def close(self) -> None:
        if self._worker is None:
            return
        self._worker.close()
        self._worker = None
        self._model.close()
        if self._ranks is not None:
            self._ranks.close()
        os.close(self.completion_fd)
