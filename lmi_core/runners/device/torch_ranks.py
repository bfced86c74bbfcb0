"""The other ranks of a model on a torch device: processes that load their slice of the weights and
compute every step with rank 0, which tells them its inputs."""

from __future__ import annotations

import logging
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lmi_core.errors import EngineError
from lmi_core.runners.cpu.ranks import RankProcess
from lmi_core.runners.device.rank_group import GlooGroup

if TYPE_CHECKING:
    from lmi_core.models.smoothing import Smoothing
    from lmi_core.ops.device.step_arrays import StepArrays
    from lmi_core.settings.engine_config import EngineConfig

log = logging.getLogger(__name__)

_MAIN = "lmi_core.runners.device.torch_rank_process"


class TorchRanks:
    """From their start to their end; they end with this process, whatever ends it."""

    def __init__(self, config: EngineConfig, smoothing: Smoothing | None) -> None:
        """Start the processes, which load their weights at once."""
        self._num_ranks = config.tensor_parallel_degree
        self._is_closing = False
        self.is_lost = False
        """Whether one of them ended, so that no step is right any more."""
        self._folder = tempfile.TemporaryDirectory(prefix="lmi-ranks-")
        self._place = Path(self._folder.name) / "group"
        self._processes: list[RankProcess] = []
        try:
            for rank in range(1, self._num_ranks):
                self._processes.append(RankProcess(rank, config.job, _MAIN))
            own, level = replace(config, speculation=None), logging.getLogger().level
            for process in self._processes:
                process.send((own, smoothing, process.rank, str(self._place), level))
        except BaseException:
            self.close()
            raise

    def join(self, num_blocks: int) -> None:
        """Return when all have their weights, and caches of so many blocks. Raises what kept one of
        them from it, EngineError where one ended without a word."""
        for process in self._processes:
            process.send(num_blocks)
        for process in self._processes:
            process.receive()
            watch = threading.Thread(target=self._watch, args=(process,), daemon=True)
            watch.start()

    def meet(self) -> GlooGroup:
        """Their group, once all have their weights; raises as ``join``."""
        for process in self._processes:
            process.receive()
        return GlooGroup(self._place, 0, self._num_ranks)

    def begin(self, arrays: StepArrays) -> None:
        """Have all compute a step, as this rank does next. Raises EngineError where one is lost."""
        if self.is_lost:
            raise EngineError("a rank of the model is lost")
        for process in self._processes:
            process.send(arrays)

    def lose(self) -> None:
        """A step went wrong between its beginning and its end: who waits for this rank, waits for
        ever."""
        self.is_lost = True
        for process in self._processes:
            process.kill()

    def close(self) -> None:
        """No step may be in flight. Idempotent."""
        self._is_closing = True
        for process in self._processes:
            process.end()
        self._folder.cleanup()

    def _watch(self, process: RankProcess) -> None:
        words = process.last_words()
        if not self._is_closing:
            self.is_lost = True
            log.error(
                "rank %d of %d ended (%s): the model's steps fail from now on",
                *(process.rank, self._num_ranks, words),
            )
