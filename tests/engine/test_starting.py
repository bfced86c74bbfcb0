"""Starts that are stopped or cancelled before all is loaded."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path

import pytest

from lmi_core.cli import DEMO_MODEL
from lmi_core.engine.engine import Engine
from lmi_core.engine.stats import LifeState
from lmi_core.errors import EngineError
from lmi_core.settings.engine_config import EngineConfig
from tests.engine.fake_runner import FakeRunner
from tests.engine.harness import make_engine, run


def test_an_engine_that_runs_is_not_started_again() -> None:
    async def main() -> None:
        async with make_engine() as engine:
            with pytest.raises(EngineError, match="the engine is ready; it can be started once"):
                await engine.start()

    run(main())


@pytest.mark.parametrize("own_loop", [False, True])
def test_an_engine_that_is_stopped_while_it_loads_does_not_start(own_loop: bool) -> None:
    engine, is_loading, may_go_on = loading_slowly(own_loop=own_loop)

    async def main() -> None:
        start = asyncio.create_task(engine.start())
        await asyncio.to_thread(is_loading.wait, 10)
        await engine.stop()
        await engine.stop()
        may_go_on.set()
        with pytest.raises(EngineError, match="the engine was stopped while it was loading"):
            await start
        assert engine.state is LifeState.STOPPED
        await engine.stop()

    run(main())


def test_a_start_that_is_cancelled_waits_beside_others() -> None:
    engine, is_loading, may_go_on = loading_slowly(own_loop=True)

    async def main() -> None:
        start = asyncio.create_task(engine.start())
        await asyncio.to_thread(is_loading.wait, 10)
        start.cancel()
        await asyncio.sleep(0.01)
        may_go_on.set()  # which nobody does where the loop is held
        with pytest.raises(asyncio.CancelledError):
            await start

    begun_s = time.monotonic()
    run(main())
    assert time.monotonic() - begun_s < 8


def test_a_start_that_is_cancelled_when_all_is_loaded_gives_it_up() -> None:
    runner = FakeRunner()
    engine = make_engine(runner, own_loop=True)

    async def main() -> None:
        start = asyncio.create_task(engine.start())
        await asyncio.sleep(0)
        wait_without_yielding(engine)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        assert engine.state is LifeState.STOPPED
        assert runner.is_closed
        await engine.stop()

    run(main())


@pytest.mark.parametrize("own_loop", [False, True])
def test_a_start_that_is_cancelled_gives_up_what_is_loaded_then(
    own_loop: bool, tmp_path: Path
) -> None:
    config = EngineConfig(model=DEMO_MODEL, prefix_cache_dir=tmp_path)

    async def main() -> None:
        engine, is_loading, may_go_on = loading_slowly(config, own_loop=own_loop)
        start = asyncio.create_task(engine.start())
        await asyncio.to_thread(is_loading.wait, 10)
        start.cancel()
        await asyncio.sleep(0)
        may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await start

    num_open = len(os.listdir("/proc/self/fd"))
    run(main())
    assert len(os.listdir("/proc/self/fd")) == num_open


def wait_without_yielding(engine: Engine) -> None:
    """Until it is ready, which the caller's loop hasn't heard of."""
    while engine.state is LifeState.LOADING:
        time.sleep(0.001)


def loading_slowly(
    config: EngineConfig | Path = DEMO_MODEL, *, own_loop: bool
) -> tuple[Engine, threading.Event, threading.Event]:
    """An engine, which says when it loads, and loads on when it may."""
    is_loading, may_go_on = threading.Event(), threading.Event()

    def progress(*_: object) -> None:
        is_loading.set()
        may_go_on.wait(10)

    return Engine(config, own_loop=own_loop, progress=progress), is_loading, may_go_on
