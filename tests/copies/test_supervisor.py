"""Numbers of copies over processes that are played here: who stays, who goes, what is left."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lmi_core.copies import supervisor as module
from lmi_core.copies.process import CopyProcess
from lmi_core.copies.supervisor import Front, Supervisor
from lmi_core.errors import EngineError
from tests.engine.harness import until


class PlayedFront:
    """Says when copies may start, leave and end."""

    def __init__(self) -> None:
        self.started: list[PlayedProcess] = []
        self.num_that_start = 99
        self.may_leave, self.may_end = asyncio.Event(), asyncio.Event()
        self.may_end.set()
        self.cores: tuple[int, ...] = ()

    async def settings(self, number: int, *, is_first: bool) -> Any:
        return SimpleNamespace(cores=self.cores)

    def link(self, settings: Any) -> PlayedFront:
        return self

    async def prepare(self, copy: CopyProcess, info: object) -> None:
        pass

    def on_up(self, copy: CopyProcess) -> None:
        pass

    def on_down(self, copy: CopyProcess) -> None:
        pass

    def on_batch(self, copy: CopyProcess, batch: object) -> None:
        pass

    async def on_leaving(self, copy: CopyProcess) -> None:
        await self.may_leave.wait()


class PlayedProcess:
    def __init__(self, copy_id: int, *arguments: Any) -> None:
        self.copy_id = copy_id
        self.front: PlayedFront = arguments[-1]
        self.on_lost = arguments[2]
        self.has_ended = False

    async def start(self) -> None:
        if len(self.front.started) >= self.front.num_that_start:
            raise EngineError("there is no room")
        self.front.started.append(self)

    async def last_words(self) -> str:
        return "lost"

    async def end(self, *, kill: bool = False) -> None:
        await self.front.may_end.wait()
        self.has_ended = True


def run(main: Coroutine[Any, Any, None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CopyProcess", PlayedProcess)
        asyncio.run(asyncio.wait_for(main, 20))


async def supervised(num_copies: int) -> tuple[PlayedFront, Supervisor]:
    front = PlayedFront()
    supervisor = Supervisor(cast(Front, front), num_copies)
    await supervisor.start()
    return front, supervisor


def test_a_copy_that_leaves_with_long_requests_holds_nobody_up() -> None:
    async def main() -> None:
        front, supervisor = await supervised(2)
        supervisor.scale(1)
        await until(lambda: bool(supervisor._leaving))
        supervisor.scale(3)
        await until(lambda: not supervisor.is_scaling)
        assert [copy.copy_id for copy in supervisor.copies] == [0, 1, 2]
        assert not any(process.has_ended for process in front.started)
        front.may_leave.set()
        supervisor.scale(1)
        await until(lambda: not supervisor.is_scaling)
        assert [process.has_ended for process in front.started] == [False, True, True]
        await supervisor.stop(kill=False)

    run(main())


def test_more_copies_do_not_wait_for_one_that_gives_them_its_cores() -> None:
    async def main() -> None:
        front, supervisor = await supervised(1)
        front.cores = (1,)
        supervisor.scale(3)
        await until(lambda: bool(supervisor._leaving))
        assert [copy.copy_id for copy in supervisor.copies] == [0, 1, 2, 3]
        front.may_leave.set()
        await until(lambda: not supervisor.is_scaling)
        assert [copy.copy_id for copy in supervisor.copies] == [1, 2, 3]
        assert [place.number for place in supervisor._places] == [0, 1, 2]
        front.cores = (3,)
        supervisor.scale(1)
        await until(lambda: not supervisor.is_scaling)
        assert [copy.copy_id for copy in supervisor.copies] == [4]
        await supervisor.stop(kill=False)

    run(main())


def test_of_too_many_copies_a_lost_one_goes_first() -> None:
    async def main() -> None:
        front, supervisor = await supervised(2)
        front.may_leave.set()
        front.num_that_start = 2
        front.started[0].on_lost(front.started[0])
        supervisor.scale(1)
        await until(lambda: not supervisor.is_scaling)
        assert [copy.copy_id for copy in supervisor.copies] == [1]
        await supervisor.stop(kill=False)

    run(main())


def test_what_could_not_be_started_can_be_asked_for_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        front, supervisor = await supervised(1)
        front.num_that_start = 2
        supervisor.scale(4)
        await until(lambda: not supervisor.is_scaling)
        assert (len(supervisor.copies), supervisor.num_wanted) == (2, 2)
        assert "another couldn't be started: there is no room" in caplog.text
        front.num_that_start = 99
        supervisor.scale(4)
        await until(lambda: len(supervisor.copies) == 4)
        await supervisor.stop(kill=False)

    run(main())


def test_nothing_outlasts_the_end() -> None:
    async def main() -> None:
        front, supervisor = await supervised(2)
        front.may_leave.set()
        front.may_end.clear()
        supervisor.scale(1)
        await until(lambda: len(supervisor.copies) == 1)
        ending = asyncio.create_task(supervisor.stop(kill=False))
        await asyncio.sleep(0)
        supervisor.scale(3)
        front.may_end.set()
        await ending
        assert [process.has_ended for process in front.started] == [True, True]
        assert not supervisor.is_scaling

    run(main())
