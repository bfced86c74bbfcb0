"""A model that is loaded, as the functions behind routes get it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeVar, cast

from lmi_core.engine.stats import EngineInfo
from lmi_core.errors import UserError
from lmi_core.receipts.store import ReceiptStore
from lmi_core.text.tokenizer import Tokenizer
from lmi_server.dialects.openai.responses_store import ResponseStore
from lmi_server.http.admission import Admission
from lmi_server.http.metrics import LoopLag, Metrics
from lmi_server.http.options import ServerOptions
from lmi_server.models.backend import AdapterHost, Attests, Generates, Reports, Tokenizes

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shared:
    """What the models of a server have together."""

    metrics: Metrics
    loop_lag: LoopLag
    responses: ResponseStore
    receipts: ReceiptStore | None = None
    """Where requests and answers are kept; None: nowhere."""


class LoadedModel:
    """Its options, who serves it, and what its calls share."""

    def __init__(self, options: ServerOptions, backend: Reports, shared: Shared) -> None:
        self.options = options
        self.backend = backend
        self.shared = shared
        self.admission = admission_of(options)
        self.call_numbers = itertools.count()
        """Clients may reuse their ids at the same time; the engine's must be unique."""
        self._generates = backend if isinstance(backend, Generates) else None
        self._tokenizes = backend if isinstance(backend, Tokenizes) else None
        self._made: dict[Callable[..., Any], Any] = {}
        self._num_users = 0
        self._became_unused = asyncio.Event()

    @contextmanager
    def in_use(self) -> Iterator[Self]:
        """For a request, from when it is this model's to its end; not all that it does lies within
        ``admission``."""
        self._num_users += 1
        try:
            yield self
        finally:
            self._num_users -= 1
            if not self._num_users:
                self._became_unused.set()

    async def unused(self) -> None:
        """Return once nobody uses it."""
        while self._num_users:
            self._became_unused.clear()
            await self._became_unused.wait()

    def of(self, make: Callable[[LoadedModel], T]) -> T:
        """What ``make`` makes of this model, once: a dialect's own counters, for example."""
        if make not in self._made:
            self._made[make] = make(self)
        return cast(T, self._made[make])

    @property
    def generates(self) -> Generates:
        """The backend; UserError where it doesn't generate."""
        return self._generates or self._refuse()

    @property
    def tokenizes(self) -> Tokenizes:
        """The backend; UserError where it knows no tokens."""
        return self._tokenizes or self._refuse()

    @property
    def info(self) -> EngineInfo:
        """The backend's; UserError where it doesn't generate."""
        return self.generates.info

    @property
    def max_model_len(self) -> int:
        """0: only the model's own code knows."""
        return 0 if self._generates is None else self._generates.max_model_len

    @property
    def tokenizer(self) -> Tokenizer:
        return self.tokenizes.tokenizer

    def decode(self, token_ids: Sequence[int]) -> str:
        """As ``Tokenizes`` has it."""
        return self.tokenizes.decode(token_ids)

    def fingerprint(self) -> str | None:
        """As ``Attests`` has it; None where nobody does."""
        return self.backend.fingerprint if isinstance(self.backend, Attests) else None

    @property
    def adapter_host(self) -> AdapterHost | None:
        """The backend, where LoRA is enabled."""
        return cast(AdapterHost, self.backend) if self.options.has_lora else None

    def adapter_names(self) -> Collection[str]:
        """The LoRA adapters that requests may name now."""
        host = self.adapter_host
        return () if host is None else host.adapters

    def _refuse(self) -> Any:
        raise UserError(
            f"The model {self.options.model_name} answers by its own handler, which knows no "
            "tokens; send requests to /invocations",
            field="model",
        )


def admission_of(options: ServerOptions) -> Admission:
    return Admission(
        max_in_flight=options.max_in_flight,
        max_request_bytes=options.max_request_bytes,
        receive_timeout_s=options.receive_timeout_s,
    )
