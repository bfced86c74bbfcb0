"""A model that answers by code of its own, in the place of an engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import NoReturn, Self

from lmi_core.custom_code.pool import CustomCodePool
from lmi_core.engine.outputs import TokenEvent
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.stats import EngineInfo, EngineStats, EngineTotals, LifeState
from lmi_core.errors import UserError
from lmi_core.settings.custom_code_config import CustomCodeConfig
from lmi_core.text.tokenizer import Tokenizer


class CustomCodeBackend:
    """Starts and stops the model's processes; LMI's routes call ``pool``, others are refused."""

    def __init__(self, config: CustomCodeConfig) -> None:
        self._name = config.model_name
        self._num_requests = 0
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

    @property
    def max_model_len(self) -> int:
        """0: only the handler knows."""
        return 0

    def generate_batches(
        self, request: GenerationRequest
    ) -> AsyncGenerator[Sequence[TokenEvent], None]:
        self._refuse()

    @property
    def info(self) -> EngineInfo:
        self._refuse()

    @property
    def tokenizer(self) -> Tokenizer:
        self._refuse()

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        self._refuse()

    def decode(self, token_ids: Sequence[int]) -> str:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UserError(
            f"The model {self._name} answers by its own handler, which knows no tokens; send "
            "requests to /invocations",
            field="model",
        )
