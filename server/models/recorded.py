"""An engine whose requests and answers are kept as receipts."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

from aiohttp import web

from lmi_core.engine.outputs import TokenEvent
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.stats import EngineInfo
from lmi_core.engine.stream import EventStream, Subscribable, batches
from lmi_core.receipts.receipt import Answers, Receipt, changed_params
from lmi_server.http.tenants import TENANT
from lmi_server.models.backend import Attests, Generates
from lmi_server.models.loaded_model import LoadedModel

_NO_KEY = "all"
"""The directory of tenants that have no name."""


@runtime_checkable
class Recordable(Generates, Subscribable, Attests, Protocol):
    """An engine that can say what decided its tokens."""


def recorded(http: web.Request, model: LoadedModel) -> Generates:
    """The model's engine, or, for a request that the receipts are to have, one that also keeps
    what it answers. Other engines than our own aren't recorded."""
    backend, store = model.generates, model.shared.receipts
    if store is None or random.random() >= store.share or not isinstance(backend, Recordable):
        return backend
    tenant = http.get(TENANT)
    name = _NO_KEY if tenant is None else tenant.name or _NO_KEY
    return RecordedEngine(backend, model.options.model_name, lambda r: store.put(name, r))


class RecordedEngine:
    """One call's engine: its answers are those of the engine that it stands for."""

    def __init__(
        self, engine: Recordable, model_name: str, keep: Callable[[Receipt], None]
    ) -> None:
        self._engine = engine
        self._model_name = model_name
        self._keep = keep

    async def subscribe(
        self, request: GenerationRequest, notify: Callable[[], None]
    ) -> EventStream:
        if request.pooling is not None:
            return await self._engine.subscribe(request, notify)
        asked = request
        if request.params.logprobs is None:
            asked = replace(request, params=replace(request.params, logprobs=0))
        stream = await self._engine.subscribe(asked, notify)
        return RecordedStream(stream, request, self._finish)

    def generate_batches(
        self, request: GenerationRequest
    ) -> AsyncGenerator[Sequence[TokenEvent], None]:
        return batches(self, request)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        return await self._engine.encode(text, add_special_tokens=add_special_tokens)

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    def _finish(
        self, request: GenerationRequest, prompt_ids: Sequence[int], answers: Answers
    ) -> None:
        """Keep what was answered, also what was cut off before its end."""
        seed = answers.seed if request.params.seed is None else request.params.seed
        self._keep(
            Receipt(
                request_id=request.request_id,
                time_s=time.time(),
                model=self._model_name,
                fingerprint=self._engine.fingerprint,
                num_prompt_tokens=len(prompt_ids),
                prompt_token_ids=list(prompt_ids),
                params=changed_params(request.params, seed),
                adapter=request.adapter,
                adapter_digest=self._engine.adapter_digest(request.adapter),
                choices=answers.so_far(request.params.n),
            )
        )


class RecordedStream(EventStream):
    """Another stream, that remembers what was taken of it. Its reader sees the log-probabilities
    that it asked for only."""

    __slots__ = ("_answers", "_finish", "_is_kept", "_request", "_stream")

    def __init__(
        self,
        stream: EventStream,
        request: GenerationRequest,
        finish: Callable[[GenerationRequest, Sequence[int], Answers], None],
    ) -> None:
        super().__init__(stream.notify)
        self._stream = stream
        self._request = request
        self._finish = finish
        self._answers = Answers()
        self._is_kept = False

    def close(self) -> None:
        self._keep()
        self._stream.close()

    def take(self) -> tuple[list[TokenEvent], bool]:
        events, is_finished = self._stream.take()
        hides = self._request.params.logprobs is None
        for event in events:
            self._answers.add(event)
            if hides:
                event.logprob, event.token = None, ""
        if is_finished:
            self._keep()
        return events, is_finished

    def _keep(self) -> None:
        """Once; a request that was refused has no prompt's tokens yet."""
        if not self._is_kept and self._stream.prompt_ids:
            self._is_kept = True
            self._finish(self._request, self._stream.prompt_ids, self._answers)
