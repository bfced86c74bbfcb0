"""The models of a server: which there are, who answers for a name, who comes and who goes."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, Self

from aiohttp import web

from lmi_core.errors import LmiError
from lmi_core.receipts.store import ReceiptStore
from lmi_server.dialects.base import HttpError
from lmi_server.dialects.openai.responses_store import ResponseStore
from lmi_server.http.admission import Admission
from lmi_server.http.error_rates import ErrorRates
from lmi_server.http.metrics import LoopLag, Metrics
from lmi_server.http.options import ServerOptions
from lmi_server.http.tracing import Tracer, open_tracer
from lmi_server.models.loaded_model import Shared, admission_of
from lmi_server.models.model import ModelState, Recipe, ServedModel

log = logging.getLogger(__name__)


class Registrar(Protocol):
    """Checks what a management call or a request asks for and says how to load it."""

    @property
    def loads_on_request(self) -> bool:
        """Whether requests may bring models of their own."""
        ...

    async def recipe(self, arguments: Mapping[str, str]) -> Recipe:
        """Raises HttpError or UserError for what this server doesn't load."""
        ...

    async def requested_recipe(self, arguments: Mapping[str, str]) -> Recipe:
        """As ``recipe``, for a model that a request brings."""
        ...

    def adapter_path(self, src: str, model_url: str) -> Path:
        """The directory of an adapter for the model from ``model_url``; HttpError for one that this
        server doesn't load."""
        ...


class ModelRegistry:
    """Every model by name and version. ``async with`` ends with all of them closed.

    One model is loaded at a time, so that each plans with the memory that is really left.
    """

    def __init__(
        self,
        options: ServerOptions,
        metrics: Metrics,
        recipes: Iterable[Recipe] = (),
        *,
        registrar: Registrar | None = None,
    ) -> None:
        """``recipes``: the models of the start. ``registrar``: None: no others are loaded."""
        self.options = options
        self.metrics = metrics
        self.registrar = registrar
        self.responses = ResponseStore(options.response_store_bytes)
        self.tracer: Tracer | None = None
        """What makes spans of calls; None: nothing does."""
        if options.otlp_endpoint is not None:
            self.tracer = open_tracer(options.otlp_endpoint, options.otlp_service_name)
        self.error_rates = ErrorRates(options.error_rates)
        self.sole: ServedModel | None = None
        """The one model, ready and of the start, of a server that has no other."""
        self.admission = admission_of(options)
        """Of bodies that are read before a model is chosen, or for none."""
        loop_lag = LoopLag(metrics, busy=lambda: self.num_in_flight > 0)
        self.receipts = None if options.record is None else ReceiptStore(options.record)
        self._shared = Shared(metrics, loop_lag, self.responses, self.receipts)
        self._models: dict[tuple[str, str | None], ServedModel] = {}
        self._turns: dict[str, int] = {}
        self._loading = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loads: set[asyncio.Task[None]] = set()
        self._is_stopping = False
        self.has_abandoned_loads = False
        """Whether threads may still load, which nothing stops."""
        for recipe in recipes:
            self._add(recipe, loaded_at_startup=True)
        metrics.in_flight.set_function(lambda: self.num_in_flight)

    def __iter__(self) -> Iterator[ServedModel]:
        """Those that aren't on their way out, in the order in which they came."""
        return (m for m in self._models.values() if m.state is not ModelState.UNLOADING)

    @property
    def default(self) -> ServedModel | None:
        """The model of requests that name none: that of the start, if there was one only."""
        of_start = [model for model in self if model.loaded_at_startup]
        return of_start[0] if len(of_start) == 1 else None

    @property
    def num_in_flight(self) -> int:
        models = sum(model.num_in_flight for model in self._models.values())
        return models + self.admission.num_in_flight

    def versions(self, name: str) -> list[ServedModel]:
        return [model for model in self if model.name == name]

    def find(self, name: str, version: str | None = None) -> ServedModel | None:
        """The model of that name and version; without a version, each has its turn."""
        if version is not None:
            model = self._models.get((name, version))
            return model if model is not None and model.state is not ModelState.UNLOADING else None
        found = self.versions(name)
        if len(found) < 2:
            return found[0] if found else None
        self._turns[name] = turn = (self._turns.get(name, -1) + 1) % len(found)
        return found[turn]

    def with_adapter(self, name: str) -> ServedModel | None:
        """The first model that has an adapter of that name."""
        return next((model for model in self if model.adapters.get(name) is not None), None)

    def has(self, name: str, version: str | None) -> bool:
        """Whether the name is taken, be it by a model that is on its way out."""
        return (name, version) in self._models

    async def load_all(self) -> None:
        """Load the models of the start, one after the other; the first failure is raised."""
        for model in list(self):
            await self._load(model)

    def add(self, recipe: Recipe) -> ServedModel:
        """Register a model of a running server; ``load`` follows."""
        return self._add(recipe, loaded_at_startup=False)

    async def load(self, model: ServedModel, *, keep_failed: bool) -> None:
        """Load a model that was added or scaled down, also if the caller is cancelled meanwhile.

        One that can't be loaded is unregistered, or with ``keep_failed`` stays as FAILED. Draining
        gives it up: HttpError 503.
        """
        await self._given_up(self._load_or_drop(model, keep_failed=keep_failed))

    async def replace(self, model: ServedModel, recipe: Recipe) -> None:
        """Have ``recipe`` answer for a model that is served: from when it is loaded, which is when
        this returns, also if the caller is cancelled meanwhile. No request is lost: those that
        have begun end where they are. What can't be loaded leaves all as it was."""
        await self._given_up(self._replace(model, recipe))

    async def remove(self, model: ServedModel) -> None:
        """Unregister: at once for new requests; returns when running ones have ended and the
        memory is free, also if the caller is cancelled meanwhile."""
        await self._shielded(self._remove(model))

    async def stop(self, model: ServedModel) -> None:
        """Scale down to no workers; the model stays registered."""
        await self._shielded(self._close(model, ModelState.STOPPED))

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something in the background; a failure is logged."""
        self._start(work)

    def start_draining(self) -> None:
        """Refuse new requests, and give up the loading of models."""
        self._is_stopping = True
        for task in self._loads:
            self.has_abandoned_loads = True
            task.cancel()
        for admission in self._admissions():
            admission.draining = True

    async def idle(self) -> None:
        """Return once no request is inside."""
        for admission in self._admissions():
            await admission.idle()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        for model in list(self._models.values()):
            await model.close(ModelState.STOPPED, drain_timeout_s=0)
        self._choose_sole()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)
        if self.receipts is not None:
            await asyncio.to_thread(self.receipts.close)

    def _add(self, recipe: Recipe, *, loaded_at_startup: bool) -> ServedModel:
        key = (recipe.name, recipe.version)
        assert key not in self._models, "the caller looks whether the name is free"
        model = ServedModel(recipe, self._shared, loaded_at_startup=loaded_at_startup)
        self._models[key] = model
        self._choose_sole()
        return model

    async def _load(self, model: ServedModel) -> None:
        async with self._loading:
            if model.state is ModelState.UNLOADING:
                return
            await model.load()
        self._choose_sole()

    async def _load_or_drop(self, model: ServedModel, *, keep_failed: bool) -> None:
        try:
            await self._load(model)
        except asyncio.CancelledError:
            log.info("model %s is not loaded any further: the server stops", model.recipe.label)
            raise _shutting_down() from None
        except Exception as error:
            expected = isinstance(error, LmiError)
            log.error(
                "model %s could not be loaded: %s",
                model.recipe.label,
                error,
                exc_info=None if expected else error,
            )
            if not keep_failed:
                self._models.pop((model.name, model.version), None)
                self._choose_sole()
            raise

    async def _replace(self, model: ServedModel, recipe: Recipe) -> None:
        try:
            async with self._loading:
                if model.state not in (ModelState.READY, ModelState.FAILED):
                    raise HttpError(503, "WlmException", f"Model is not ready: {model.name}")
                await model.replace(recipe)
            self._choose_sole()
        except asyncio.CancelledError:
            raise _shutting_down() from None
        except Exception as error:
            expected = isinstance(error, LmiError | HttpError)
            log.error(
                "model %s could not be replaced: %s",
                model.recipe.label,
                error,
                exc_info=None if expected else error,
            )
            raise
        self._start(self._retire(model))

    async def _retire(self, model: ServedModel) -> None:
        try:
            await model.retire()
        except Exception:
            log.exception("what model %s has replaced did not end well", model.recipe.label)
        gc.collect()

    async def _given_up(self, load: Coroutine[Any, Any, None]) -> None:
        """Load something, unless and until the server stops."""
        if self._is_stopping:
            load.close()
            raise _shutting_down()
        task = self._start(load)
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)
        await asyncio.shield(task)

    async def _remove(self, model: ServedModel) -> None:
        await self._close(model, ModelState.UNLOADING)
        self._models.pop((model.name, model.version), None)
        self._choose_sole()

    async def _close(self, model: ServedModel, end: ModelState) -> None:
        # Set before the first wait: no request that comes now is for this model.
        model.state = end
        self._choose_sole()
        async with self._loading:
            await model.close(end, drain_timeout_s=self.options.drain_timeout_s)
        # What the engine's parts hold in cycles is memory that the next model may need. Modules are
        # frozen: to look at them, too, would take 40 ms.
        gc.collect()
        self._choose_sole()

    def _choose_sole(self) -> None:
        models = list(self._models.values())
        only = models[0] if len(models) == 1 and models[0].loaded_at_startup else None
        self.sole = only if only is not None and only.state is ModelState.READY else None

    def _admissions(self) -> list[Admission]:
        of_models = (model.admissions for model in self._models.values())
        return [self.admission, *itertools.chain.from_iterable(of_models)]

    async def _shielded(self, work: Coroutine[Any, Any, None]) -> None:
        await asyncio.shield(self._start(work))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # it is seen: whoever waited has it, and the log has


MODELS = web.AppKey("models", ModelRegistry)
"""Of an application: what it serves."""


def _shutting_down() -> HttpError:
    return HttpError(503, "WlmException", "Worker shutting down", close=True)
