"""A model that answers by code of its own, in the place of an engine."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from lmi_core.custom_code.pool import CustomCodePool
from lmi_core.engine.stats import EngineStats, EngineTotals, LifeState
from lmi_core.settings.custom_code_config import CustomCodeConfig


class CustomCodeBackend:
    """Starts and stops the model's processes; routes that it may answer call ``pool``."""

    def __init__(self, config: CustomCodeConfig) -> None:
        self._state = LifeState.CREATED
        self.pool = CustomCodePool(config)

    async def __aenter__(self) -> Self:
        self._state = LifeState.LOADING
        await self.pool.start()
        self._state = LifeState.READY
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.pool.stop()
        self._state = LifeState.STOPPED

    @property
    def healthy(self) -> bool:
        return not self.pool.has_failed

    @property
    def lacks_workers(self) -> bool:
        return self.pool.lacks_workers

    @property
    def worker_starts(self) -> list[float]:
        return [worker.started_at for worker in self.pool.workers if worker.is_ready]

    async def scale(self, min_workers: int, max_workers: int) -> None:
        """Those too many end once they are idle."""
        self.pool.scale(min_workers, max_workers)

    def stats(self) -> EngineStats:
        return EngineStats(
            state=self._state,
            is_healthy=self.healthy,
            num_running=self.pool.num_running,
            num_waiting=len(self.pool.queue),
            num_blocks=0,
            num_used_blocks=0,
            num_cached_blocks=0,
            num_free_blocks=0,
            totals=EngineTotals(num_requests=self.pool.num_requests),
        )
