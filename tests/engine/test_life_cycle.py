"""Starting, stopping, forking, and an event loop of one's own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lmi_core
from lmi_core.cli import DEMO_MODEL
from lmi_core.engine.engine import Engine
from lmi_core.engine.make_request import make_request
from lmi_core.engine.outputs import FinishReason
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.engine.stats import LifeState
from lmi_core.errors import EngineError, ModelError, UserError
from lmi_core.runners.cpu.cpu_model import check_sizes
from lmi_core.settings.engine_config import EngineConfig
from tests.engine.fake_runner import FakeRunner
from tests.engine.harness import (
    assert_nothing_leaked,
    byte_tokenizer,
    collect,
    make_engine,
    run,
    token_ids,
    until,
)
from tests.engine.oracle import expected_tokens

PROMPT = list(range(40))


def test_life_cycle() -> None:
    async def main() -> None:
        runner = FakeRunner(step_s=0.001)
        engine = make_engine(runner)
        assert engine.state.value == "created"
        assert not engine.healthy
        with pytest.raises(EngineError, match="start it"):
            await collect(engine, [1])
        async with engine:
            assert engine.state is LifeState.READY
            assert engine.healthy
            task = asyncio.create_task(collect(engine, [1], SamplingParams(max_new_tokens=30)))
            await until(lambda: engine.stats().num_running == 1)
        assert task.done() or await asyncio.wait_for(task, 30)
        assert task.result()[-1].finish_reason is not FinishReason.ABORT
        assert engine.state is LifeState.STOPPED
        assert runner.is_closed
        with pytest.raises(EngineError, match="stopped"):
            await collect(engine, [1])
        await engine.stop()

    run(main())


def test_stopping_with_a_deadline_aborts_the_rest() -> None:
    async def main() -> None:
        engine = make_engine(FakeRunner(step_s=0.01))
        await engine.start()
        task = asyncio.create_task(collect(engine, [1], SamplingParams(ignore_eos=True)))
        await until(lambda: engine.stats().num_running == 1)
        await engine.stop(timeout_s=0.05)
        events = await task
        assert events[-1].finish_reason is FinishReason.ABORT
        await assert_nothing_leaked(engine)

    run(main())


def test_a_reader_that_fails_ends_its_own_request_alone() -> None:
    async def main() -> None:
        async with make_engine(FakeRunner(step_s=0.002)) as engine:
            calls = 0

            def notify() -> None:
                nonlocal calls
                calls += 1
                raise ValueError("a reader's mistake")

            params = SamplingParams(max_new_tokens=20, ignore_eos=True)
            other = asyncio.create_task(collect(engine, [1], params))
            await engine.subscribe(make_request([1], params, {}, "failing"), notify)
            assert len(token_ids(await other)) == 20
            assert calls == 1
            assert engine.healthy
            await assert_nothing_leaked(engine)

    run(main())


def test_threads_may_stop_an_engine_together() -> None:
    with ThreadPoolExecutor(8) as threads:
        for _ in range(30):
            engine = make_engine(own_loop=True)
            asyncio.run(engine.start())
            stops = [threads.submit(asyncio.run, engine.stop()) for _ in range(8)]
            assert [stop.exception() for stop in stops] == [None] * 8
            assert engine.state is LifeState.STOPPED


def test_leaving_by_an_exception_aborts() -> None:
    async def main() -> None:
        engine = make_engine(FakeRunner(step_s=0.005))
        tasks = []

        async def leave() -> None:
            async with engine:
                tasks.append(
                    asyncio.create_task(collect(engine, [1], SamplingParams(ignore_eos=True)))
                )
                await until(lambda: engine.stats().num_running == 1)
                raise KeyError

        with pytest.raises(KeyError):
            await leave()
        assert (await tasks[0])[-1].finish_reason is FinishReason.ABORT
        await assert_nothing_leaked(engine)

    run(main())


def test_use_after_fork_is_refused() -> None:
    async def main() -> None:
        async with make_engine() as engine:
            await collect(engine, [1], SamplingParams(max_new_tokens=1))
            with warnings.catch_warnings():  # newer Pythons advise against forking with threads
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                if engine.healthy or engine.state is not LifeState.STOPPED:
                    os._exit(3)
                try:
                    engine.stats()
                except EngineError as error:
                    os._exit(7 if "fork" in str(error) else 1)
                os._exit(2)
            _, status = await asyncio.to_thread(os.waitpid, pid, 0)
            assert os.waitstatus_to_exitcode(status) == 7
            await collect(engine, [1], SamplingParams(max_new_tokens=1))

    run(main())


_IN_A_CHILD = """
import os, sys, warnings
from pathlib import Path
from lmi_core import Engine, EngineConfig, SamplingParams

warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons advise against it
path, prefixes = sys.argv[1:]

def generated():
    with Engine(path, own_loop=True) as engine:
        params = SamplingParams(max_new_tokens=4)
        return [event.token_id for event in engine.generate_sync("Once upon", params)]

config = EngineConfig(model=Path(path), prefix_cache_dir=Path(prefixes))
with Engine(config, own_loop=True) as engine:
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, repr(generated()).encode())
        del engine
        sys.exit(0)
    assert os.read(read, 1000).decode() == repr(generated())
    assert os.wait()[1] == 0
"""


def test_a_child_may_start_an_engine_of_its_own_while_the_parents_runs(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", _IN_A_CHILD, str(DEMO_MODEL), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(("own_loop", "how"), [(False, "'async with'"), (True, "'with' or")])
def test_an_engine_that_was_not_started_says_how(own_loop: bool, how: str) -> None:
    with pytest.raises(EngineError, match=f"is created; start it with {how}"):
        make_engine(own_loop=own_loop).stats()


def test_an_engine_that_was_stopped_takes_nothing() -> None:
    with make_engine(own_loop=True) as engine:
        list(engine.generate_sync(PROMPT, SamplingParams(max_new_tokens=1)))
    asyncio.run(engine.stop())
    stopped = "the engine is stopped, it takes no new requests"
    with pytest.raises(EngineError, match=stopped):
        engine.complete_sync(PROMPT)
    for call in (engine.complete(PROMPT), engine.encode("a")):
        with pytest.raises(EngineError, match=stopped):
            asyncio.run(call)


def test_an_engine_that_failed_to_start_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    engine = Engine(tmp_path, own_loop=True)
    with pytest.raises(ModelError), engine:
        pass
    with pytest.raises(EngineError, match="the engine is stopped; it can be started once"):
        engine.complete_sync("a")


def test_the_package_shows_its_names_and_imports_them_late() -> None:
    assert dir(lmi_core) == lmi_core.__all__
    for name in lmi_core.__all__:
        assert getattr(lmi_core, name) is not None


def test_own_loop_synchronous() -> None:
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    with make_engine(own_loop=True) as engine:
        events = list(engine.generate_sync(PROMPT, params))
        assert token_ids(events) == expected_tokens(PROMPT, params)
        with pytest.raises(UserError, match="empty"):
            list(engine.generate_sync(""))
        iterator = engine.generate_sync(PROMPT, SamplingParams(ignore_eos=True))
        next(iterator)
        iterator.close()
        list(engine.generate_sync(PROMPT, SamplingParams(max_new_tokens=1)))
        asyncio.run(assert_nothing_leaked(engine))


def test_own_loop_from_another_event_loop() -> None:
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)

    async def main() -> None:
        async with make_engine(own_loop=True) as engine:
            results = await asyncio.gather(*(collect(engine, [i, *PROMPT], params) for i in (1, 2)))
            for i, events in zip((1, 2), results, strict=True):
                assert token_ids(events) == expected_tokens([i, *PROMPT], params)
            assert await engine.encode("ab") == byte_tokenizer().encode_now("ab")

    run(main())


@pytest.mark.parametrize("token_ids", [None, "ab", [1.5], ["a"], 3, {"a": 1}])
def test_what_cannot_be_decoded(token_ids: Any) -> None:
    async def main() -> None:
        async with make_engine() as engine:
            with pytest.raises(UserError, match="token ids are ints"):
                engine.decode(token_ids)
            assert engine.decode(np.array([97, 98])) == engine.decode([97, 98])  # type: ignore[arg-type]

    run(main())


@pytest.mark.parametrize("text", [None, b"a", [1]])
def test_what_cannot_be_encoded(text: Any) -> None:
    async def main() -> None:
        async with make_engine() as engine:
            with pytest.raises(UserError, match="isn't a text"):
                await engine.encode(text)

    run(main())


def test_the_package_exports_what_embedding_needs() -> None:
    assert lmi_core.Engine is Engine
    with pytest.raises(AttributeError, match="no attribute 'engin'"):
        lmi_core.engin  # noqa: B018


def test_synchronous_use_needs_an_own_loop() -> None:
    runner = FakeRunner()
    with pytest.raises(UserError, match="own_loop=True"), make_engine(runner):
        pass
    runner.close()


def test_synchronous_use_would_hold_an_event_loop() -> None:
    async def main() -> None:
        runner = FakeRunner()
        with (
            pytest.raises(UserError, match="write 'async with'"),
            make_engine(runner, own_loop=True),
        ):
            pass
        runner.close()

    run(main())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_threads", 100_000),
        ("max_num_seqs", 10**9),
        ("max_num_batched_tokens", 10**10),
        ("block_size", 40),
        ("block_size", 0),
        ("kv_cache_bytes", 10**18),
    ],
)
def test_sizes_that_no_machine_has_are_refused(name: str, value: int) -> None:
    config = EngineConfig(model=Path("unread"), **{name: value})  # type: ignore[arg-type]
    with pytest.raises(UserError, match=f"{name} is {value}"):
        check_sizes(config)


def test_what_is_encoded_while_the_engine_drains_is_not_admitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        runner = FakeRunner(step_s=0.001)
        async with make_engine(runner) as engine:
            may_go_on, encode = asyncio.Event(), engine.tokenizer.encode

            async def slow(*args: Any, **kwargs: Any) -> list[int]:
                await may_go_on.wait()
                return await encode(*args, **kwargs)

            monkeypatch.setattr(engine.tokenizer, "encode", slow)
            others = asyncio.create_task(
                collect(engine, [1, 2], SamplingParams(max_new_tokens=150, ignore_eos=True))
            )
            late = asyncio.create_task(collect(engine, "late", SamplingParams(max_new_tokens=2)))
            await until(lambda: engine.stats().num_running == 1)
            stopping = asyncio.create_task(engine.stop(drain=True))
            await until(lambda: engine.stats().state is LifeState.DRAINING)
            may_go_on.set()
            with pytest.raises(EngineError, match="takes no new requests"):
                await late
            assert len(await others) == 150
            await stopping

    run(main())
