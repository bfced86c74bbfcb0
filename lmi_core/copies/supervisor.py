"""Keeps as many copies running as are wanted: starts, restarts with pauses, changes of number."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from lmi_core.copies.link import Link
from lmi_core.copies.outbox import Batch
from lmi_core.copies.process import CopyProcess, CopySettings
from lmi_core.engine.stats import EngineInfo
from lmi_core.errors import EngineError
from lmi_core.sandbox.restart import pause_s

log = logging.getLogger(__name__)

MAX_FAILURES_IN_A_ROW = 10
"""After more of them, of which no request was answered in between, no copy is started any more."""


class Front(Protocol):
    """Who uses the copies."""

    async def settings(self, number: int, *, is_first: bool) -> CopySettings:
        """Of the copy with this number among those that are wanted, from 0."""
        ...

    def link(self, settings: CopySettings) -> Link:
        """To where a copy is to be."""
        ...

    def on_batch(self, copy: CopyProcess, batch: Batch) -> None: ...

    async def prepare(self, copy: CopyProcess, info: EngineInfo) -> None:
        """A copy is ready, and gets requests when this has returned."""
        ...

    def on_up(self, copy: CopyProcess) -> None: ...

    def on_down(self, copy: CopyProcess) -> None:
        """A copy that was up is gone."""
        ...

    async def on_leaving(self, copy: CopyProcess) -> None:
        """A copy is to go: returns when it has nothing to do any more. If it is cancelled, the copy
        stays."""
        ...

    def on_failed(self) -> None:
        """No copy will be started any more, and none runs."""
        ...


class Supervisor:
    """Runs ``num_wanted`` copies, each kept by a task of its own. Used in one event loop."""

    def __init__(
        self,
        front: Front,
        num_copies: int,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self._front = front
        self._progress = progress
        self._ids = itertools.count()
        self._places: list[_Place] = []
        self._scaling = asyncio.Lock()
        self._rescaling: set[asyncio.Task[None]] = set()
        self._adding: set[asyncio.Task[None]] = set()
        self._leaving: set[asyncio.Task[None]] = set()
        self._has_stopped = False
        self._num_failures = 0
        self.num_wanted = num_copies
        self.has_failed = False

    @property
    def copies(self) -> list[CopyProcess]:
        """Those that get requests."""
        return [place.copy for place in self._places if place.copy is not None]

    async def start(self) -> None:
        """Start the first copies, one before the others, which then find its packed weights; raises
        what any of their starts raised."""
        first, *others = [self._new_place(number) for number in range(self.num_wanted)]
        try:
            await first.launch(self._progress, is_first=True)
            async with asyncio.TaskGroup() as group:
                for place in others:
                    group.create_task(place.launch(None))
        except BaseExceptionGroup as failures:
            await self.stop(kill=True)
            raise failures.exceptions[0] from None
        except BaseException:
            await self.stop(kill=True)
            raise
        for place in self._places:
            place.keep()

    async def stop(self, *, kill: bool) -> None:
        """End every copy; none is started from now on. Idempotent."""
        self._has_stopped = True
        rescaling = list(self._rescaling)
        for task in rescaling:
            task.cancel()
        await asyncio.gather(*rescaling, return_exceptions=True)
        places, self._places = self._places, []
        await asyncio.gather(*(place.stop(kill=kill) for place in places))

    def scale(self, num_copies: int) -> None:
        """Run another number of copies from now on, in the background: more are started together.
        All others are replaced, one after the other, where each gets another share of the cores;
        none goes before the next one is there. What can't be started isn't wanted any more."""
        if num_copies != self.num_wanted and not self._has_stopped:
            # There may be no room for a copy for long, and one that leaves may have long requests.
            for task in self._adding if num_copies < self.num_wanted else self._leaving:
                task.cancel()
            self.num_wanted = num_copies
            _in(self._rescaling, self._rescale())

    async def _rescale(self) -> None:
        async with self._scaling:
            num_copies = self.num_wanted
            try:
                await self._change_number(num_copies)
            except Exception as error:
                log.error(
                    "there are %d copies: another couldn't be started: %s", len(self.copies), error
                )
                if self.num_wanted == num_copies:  # they can be asked for again then
                    self.num_wanted = len(self._places)

    async def _change_number(self, num_copies: int) -> None:
        kept = [place for place in self._places if await place.has_its_cores()]
        kept.sort(key=lambda place: place.copy is None)  # the last ones go
        outdated = [place for place in self._places if place not in kept]
        free = sorted(set(range(num_copies)) - {place.number for place in kept})
        new = free[: max(0, num_copies - len(kept))]
        num_more = max(0, len(new) - len(outdated))
        added = await asyncio.gather(*map(self._add, new[:num_more]), return_exceptions=True)
        for failure in filter(None, added):
            raise failure
        for number in new[num_more:]:
            await self._add(number)
            await self._retire(outdated.pop(0))
        for place in [*outdated, *kept[num_copies:]]:
            await self._retire(place)

    def _add(self, number: int) -> asyncio.Task[None]:
        """A copy more; cancelled where fewer are wanted meanwhile."""
        return _in(self._adding, self._launched(number))

    async def _launched(self, number: int) -> None:
        place = self._new_place(number)
        try:
            await place.launch(None)
        except BaseException:
            self._places.remove(place)
            await place.stop(kill=True)
            raise
        place.keep()

    @property
    def is_scaling(self) -> bool:
        return bool(self._rescaling)

    def note_success(self) -> None:
        """A copy has answered a request."""
        self._num_failures = 0

    def note_failure(self, why: str) -> None:
        """A copy was lost, or could not be started."""
        self._num_failures += 1
        log.error("%s (failure %d in a row)", why, self._num_failures)
        if self._num_failures > MAX_FAILURES_IN_A_ROW and not self.copies:
            self.has_failed = True
            log.error("no copy is started any more")
            self._front.on_failed()

    def _new_place(self, number: int) -> _Place:
        place = _Place(self, number)
        self._places.append(place)
        return place

    async def _retire(self, place: _Place) -> None:
        """Cancelled, and its copy stays, where more are wanted meanwhile."""
        if place.copy is not None:
            await _in(self._leaving, self._front.on_leaving(place.copy))
        await place.stop(kill=False)
        self._places.remove(place)  # stop() looks here until it has ended


def _in(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Work that is among ``tasks`` until it is done."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


class _Place:
    """One copy after the other."""

    def __init__(self, supervisor: Supervisor, number: int) -> None:
        self._supervisor = supervisor
        self._front = supervisor._front
        self.number = number
        self.copy: CopyProcess | None = None
        """While it gets requests."""
        self._cores: tuple[object, ...] = ()
        self._process: CopyProcess | None = None
        self._lost = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def launch(
        self, progress: Callable[[str, int, int], None] | None, *, is_first: bool = False
    ) -> None:
        """Start a process until it gets requests; raises what keeps it from that."""
        settings = await self._front.settings(self.number, is_first=is_first)
        self._cores = settings.cores
        self._lost.clear()
        copy = CopyProcess(
            next(self._supervisor._ids),
            settings,
            self._front.on_batch,
            self._on_lost,
            progress,
            self._front.link(settings),
        )
        self._process = copy
        info = await copy.start()
        await self._front.prepare(copy, info)
        if self._lost.is_set():
            raise EngineError(f"copy {copy.copy_id} ended before it got requests")
        self.copy = copy
        self._front.on_up(copy)

    async def has_its_cores(self) -> bool:
        """Whether its copy would be started with the same part of them again."""
        settings = await self._front.settings(self.number, is_first=False)
        return self._cores == settings.cores

    def keep(self) -> None:
        """Restart it whenever it is lost, from now on."""
        self._task = asyncio.create_task(self._keep())

    async def stop(self, *, kill: bool) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.copy = None
        if self._process is not None:
            await self._process.end(kill=kill)

    def _on_lost(self, _: CopyProcess) -> None:
        copy, self.copy = self.copy, None
        self._lost.set()
        if copy is not None:
            self._front.on_down(copy)

    async def _keep(self) -> None:
        supervisor = self._supervisor
        while True:
            await self._lost.wait()
            assert self._process is not None
            why = await self._process.last_words()
            supervisor.note_failure(f"copy {self._process.copy_id} ended ({why})")
            while not supervisor.has_failed and not await self._restart():
                pass
            if supervisor.has_failed:
                return

    async def _restart(self) -> bool:
        await asyncio.sleep(pause_s(self._supervisor._num_failures))
        try:
            await self.launch(None)
        except Exception as error:
            self._supervisor.note_failure(f"a copy could not be started: {error}")
            return False
        log.warning("a copy takes the place of a lost one")
        return True
