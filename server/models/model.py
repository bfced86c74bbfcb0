"""A model in a server, from its recipe to its end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from lmi_core.engine.stats import EngineObserver
from lmi_core.errors import EngineError
from lmi_server.dialects.base import HttpError
from lmi_server.http.admission import Admission
from lmi_server.http.options import ServerOptions
from lmi_server.models.backend import Reports, Scales
from lmi_server.models.loaded_model import LoadedModel, Shared
from lmi_server.models.model_adapters import ModelAdapters

log = logging.getLogger(__name__)


class ModelState(StrEnum):
    """Where a model is in its life."""

    LOADING = "loading"
    READY = "ready"
    STOPPED = "stopped"
    """Scaled down to no workers: its memory is free, requests are refused."""
    FAILED = "failed"
    UNLOADING = "unloading"


class Opened(NamedTuple):
    """A model whose files are here: its options, and the engine that entering starts."""

    options: ServerOptions
    engine: AbstractAsyncContextManager[Reports]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a model is called, how it is opened, and what management reports about it."""

    name: str
    version: str | None = None
    open: Callable[[EngineObserver], Awaitable[Opened]]
    """Fetch the files and make the engine; may be called again after the engine has stopped."""
    url: str = ""
    engine: str = ""
    """What computes, in words."""
    queue_size: int = 1000
    batch_size: int = 1
    max_batch_delay_ms: int = 100
    max_idle_s: int = 60
    min_workers: int = 1
    max_workers: int = 1
    loading_timeout_s: float | None = None
    """None: any time; processes have a limit of their own."""
    has_processes: bool = False
    """Its workers are processes, of which there may be any number; else one engine serves it."""
    has_code: bool = False
    """Code of its own answers."""

    @property
    def label(self) -> str:
        """The model's name in metrics and logs."""
        return self.name if self.version is None else f"{self.name}:{self.version}"


def recipe_of_engine(
    engine: AbstractAsyncContextManager[Reports], options: ServerOptions, url: str = ""
) -> Recipe:
    """The recipe of a model whose engine is made already."""

    async def give(_: EngineObserver) -> Opened:
        return Opened(options, engine)

    return Recipe(name=options.model_name, version=options.model_version, open=give, url=url)


class ServedModel:
    """One model of a server, loaded or not."""

    def __init__(self, recipe: Recipe, shared: Shared, *, loaded_at_startup: bool) -> None:
        self.recipe = recipe
        self.loaded_at_startup = loaded_at_startup
        self.state = ModelState.LOADING
        self.min_workers = recipe.min_workers
        self.max_workers = recipe.max_workers
        self.loaded: LoadedModel | None = None
        self.adapters = ModelAdapters()
        self.loaded_at = 0.0
        """Seconds since the epoch."""
        self._shared = shared
        self._engine: AbstractAsyncContextManager[Reports] | None = None
        self._replaced: dict[LoadedModel, AbstractAsyncContextManager[Reports]] = {}
        """What answers requests of before, and nothing else."""

    @property
    def name(self) -> str:
        return self.recipe.name

    @property
    def version(self) -> str | None:
        return self.recipe.version

    @property
    def status(self) -> str:
        """Healthy, Unhealthy, PENDING or FAILED, in the words of DJL-Serving."""
        match self.state:
            case ModelState.LOADING:
                return "PENDING"
            case ModelState.FAILED:
                return "FAILED"
            case _:
                return "Healthy" if self.loaded is None else _health(self.loaded.backend)

    @property
    def takes_requests(self) -> bool:
        """Whether there is somebody to answer, be it fewer workers than there should be."""
        return self.status in ("Healthy", "Unhealthy")

    @property
    def admissions(self) -> list[Admission]:
        """Of those who answer its requests."""
        now = [] if self.loaded is None else [self.loaded]
        return [loaded.admission for loaded in (*now, *self._replaced)]

    @property
    def num_in_flight(self) -> int:
        return sum(admission.num_in_flight for admission in self.admissions)

    def answering(self) -> LoadedModel:
        """What answers requests; HttpError 503 while the model takes none."""
        if self.state is ModelState.STOPPED:
            message = f"All model workers has been shutdown: {self.name}"
            raise HttpError(503, "WlmShutdownException", message)
        if self.loaded is None:
            raise HttpError(503, "WlmException", f"Model is not ready: {self.name}")
        return self.loaded

    async def load(self) -> None:
        """Open the model and start its engine; on failure it is FAILED and the error is raised."""
        self.state = ModelState.LOADING
        try:
            await self._serve_by(self.recipe)
        except BaseException:
            self.state = ModelState.FAILED
            raise
        if self.state is ModelState.LOADING:  # it may have to leave at once
            self.state = ModelState.READY

    async def replace(self, recipe: Recipe) -> None:
        """Answer by another recipe of the same name from now on, also where the one before couldn't
        be loaded; ``retire`` follows. Raises what its loading raises, and all stays as it was."""
        loaded, engine = self.loaded, self._engine
        await self._serve_by(recipe, is_another=True)
        self.recipe = recipe
        self.min_workers, self.max_workers = recipe.min_workers, recipe.max_workers
        if loaded is not None and engine is not None:
            self._replaced[loaded] = engine
        if self.state is ModelState.FAILED:
            self.state = ModelState.READY

    async def retire(self) -> None:
        """Let what was replaced finish the requests that it has, however long they take, and end
        it."""
        await asyncio.gather(*map(self._retire, list(self._replaced)))

    async def _retire(self, loaded: LoadedModel) -> None:
        await loaded.unused()
        engine = self._replaced.pop(loaded, None)
        if engine is not None:
            await engine.__aexit__(None, None, None)

    async def _serve_by(self, recipe: Recipe, *, is_another: bool = False) -> None:
        label, metrics = recipe.label, self._shared.metrics
        try:
            async with asyncio.timeout(recipe.loading_timeout_s):
                options, engine = await recipe.open(metrics.observer(label))
                backend = await engine.__aenter__()
        except TimeoutError as error:
            raise EngineError(
                f"model {label} was not loaded within {recipe.loading_timeout_s:g} s "
                "(option.model_loading_timeout)"
            ) from error
        try:
            loaded = LoadedModel(options, backend, self._shared)
            adapters = self.adapters.for_another() if is_another else self.adapters
            await adapters.attach(loaded.adapter_host)
        except BaseException as error:
            await engine.__aexit__(type(error), error, error.__traceback__)
            raise
        self.loaded, self._engine, self.adapters = loaded, engine, adapters
        metrics.engines.read_from(label, backend.stats)
        self.loaded_at = time.time()

    async def close(self, end: ModelState, *, drain_timeout_s: float) -> None:
        """Be in state ``end``: refuse new requests, let running ones finish in time, then stop the
        engine, and those that it has replaced, and give back their memory."""
        self.state = end
        cut_off: TimeoutError | None = None
        try:
            async with asyncio.timeout(drain_timeout_s if self.num_in_flight else None):
                for admission in self.admissions:
                    admission.draining = True
                for admission in self.admissions:
                    await admission.idle()
        except TimeoutError as error:
            cut_off = error
            log.warning(
                "model %s: %d requests did not finish and are cut off",
                self.recipe.label,
                self.num_in_flight,
            )
        engines = [*self._replaced.values()]
        if self._engine is not None:
            self._shared.metrics.engines.forget(self.recipe.label)
            engines.append(self._engine)
        self.loaded = self._engine = None
        self._replaced.clear()
        kind = None if cut_off is None else TimeoutError
        await asyncio.gather(*(engine.__aexit__(kind, cut_off, None) for engine in engines))


def _health(backend: Reports) -> str:
    if not backend.healthy:
        return "FAILED"
    lacks_workers = isinstance(backend, Scales) and backend.lacks_workers
    return "Unhealthy" if lacks_workers else "Healthy"
