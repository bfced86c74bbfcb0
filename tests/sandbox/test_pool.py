"""Children end calls that take too much, and nothing of them stays."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from lmi_core.errors import CapacityError, EngineError, UserError
from lmi_core.sandbox import pool as pool_module
from lmi_core.sandbox.pool import CLIENT, Limits, SandboxPool
from tests.engine.harness import until
from tests.sandbox import work

LIMITS = Limits(what="the work", field="prompt", processor_s=1, memory_bytes=64 << 20)


def run(test: Callable[[SandboxPool], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        pool = SandboxPool(**options)
        try:
            await test(pool)
        finally:
            pool.close()

    asyncio.run(main())


def is_running(pid: int) -> bool:
    """Not even waiting for its parent to notice its end."""
    return "Z (zombie)" not in Path(f"/proc/{pid}/status").read_text()


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("function", "arguments", "words"),
    [
        (work.spin, (), "takes more than 1 s of processor time; make it smaller"),
        (work.allocate, (1 << 30,), "takes more memory than it may"),
        (work.large, (32 << 20,), "takes too much room: 335"),
        (work.die, (), "takes more memory than it may"),
    ],
)
def test_limits(function: Any, arguments: tuple[Any, ...], words: str) -> None:
    """The call alone fails; the next one is served."""

    async def test(pool: SandboxPool) -> None:
        with pytest.raises(UserError, match=f"^the work {words}") as caught:
            await pool.run(function, *arguments, limits=LIMITS)
        assert caught.value.field == "prompt"
        assert await pool.run(work.pid, limits=LIMITS) != os.getpid()

    run(test)


def test_a_child_serves_many_calls_and_ends_when_idle() -> None:
    async def test(pool: SandboxPool) -> None:
        pids = {await pool.run(work.pid, limits=LIMITS) for _ in range(3)}
        assert len(pids) == 1
        pool._idle_s = 0.01
        await pool.run(work.pid, limits=LIMITS)
        await until(lambda: not is_alive(*pids))
        assert await pool.run(work.pid, limits=LIMITS) not in pids

    run(test)


def test_children_of_a_large_process_are_kept() -> None:
    """A process's peak is told to those that it starts, but isn't theirs."""
    ballast = bytearray(1 << 30)
    ballast[:: 1 << 12] = bytes([1]) * (1 << 18)

    async def test(pool: SandboxPool) -> None:
        pids = {await pool.run(work.pid, limits=LIMITS) for _ in range(2)}
        assert len(pids) == 1

    run(test)
    assert len(ballast) == 1 << 30


def test_one_that_was_large_gives_its_memory_back() -> None:
    async def test(pool: SandboxPool) -> None:
        limits = Limits(what="the work", memory_bytes=2 << 30)
        pid = await pool.run(work.pid, limits=limits)
        assert await pool.run(work.grow_and_stay, 900 << 20, limits=limits) == 900 << 20
        assert pool.num_idle == 0
        assert not is_alive(pid)

    run(test)


def test_a_child_that_was_killed_while_idle_is_replaced() -> None:
    async def test(pool: SandboxPool) -> None:
        pid = await pool.run(work.pid, limits=LIMITS)
        os.kill(pid, 9)
        await until(lambda: not is_running(pid))
        assert await pool.run(work.pid, limits=LIMITS) != pid

    run(test)


def test_a_caller_that_leaves_ends_its_call(tmp_path: Path) -> None:
    begun = tmp_path / "begun"

    async def test(pool: SandboxPool) -> None:
        pid = await pool.run(work.pid, limits=LIMITS)
        task = asyncio.create_task(pool.run(work.sleep, 1000.0, begun, limits=LIMITS))
        await until(begun.exists)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not is_alive(pid))
        assert await pool.run(work.pid, limits=LIMITS)

    run(test, num_children=1)


def test_results_errors_and_logs_come_back(caplog: pytest.LogCaptureFixture) -> None:
    async def test(pool: SandboxPool) -> None:
        with pytest.raises(work.Refusal, match="no") as caught:
            await pool.run(work.refuse, limits=LIMITS)
        assert (caught.value.code, caught.value.hint) == (7, "ask again")
        assert await pool.run(work.warn, "é", limits=LIMITS) == "é"
        assert caplog.record_tuples == [("tests.sandbox", logging.WARNING, "seen: é")]
        with pytest.raises(EngineError, match="the child's result can't be sent"):
            await pool.run(work.generate, limits=LIMITS)
        known = asyncio.get_running_loop()  # can't be pickled
        name = await pool.run(work.name_of, known, limits=LIMITS, known=known, stand_in=LIMITS)
        assert name == "Limits"

    run(test)


def test_the_server_s_secrets_stay_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVING_ADMIN_KEY", "secret")

    async def test(pool: SandboxPool) -> None:
        assert "secret" not in (await pool.run(work.environment, limits=LIMITS)).values()

    run(test)


def test_too_many_calls_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_MAX_CALLS", 2)

    async def test(pool: SandboxPool) -> None:
        calls = [pool.run(work.sleep, 0.2, limits=LIMITS) for _ in range(3)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [isinstance(result, CapacityError) for result in results] == [False, False, True]

    run(test, num_children=1)


def call(pool: SandboxPool, client: str | None, *what: Any, size: int = 0) -> asyncio.Task[Any]:
    """A client's, as a task of its own."""

    async def make() -> Any:
        CLIENT.set(client)
        return await pool.run(*what, limits=LIMITS, num_bytes=size)

    return asyncio.create_task(make())


def test_a_clients_calls_leave_a_child_to_others() -> None:
    """Six of one client would take all children, one after the other."""

    async def test(pool: SandboxPool) -> None:
        first = [call(pool, "a", work.sleep, 1000.0) for _ in range(6)]
        await asyncio.sleep(0.1)
        assert await call(pool, "b", work.pid)
        assert not any(task.done() for task in first)
        for task in first:
            task.cancel()
        await asyncio.gather(*first, return_exceptions=True)
        assert await call(pool, "a", work.pid)

    run(test)


def test_large_calls_leave_a_child_to_smaller_ones() -> None:
    async def test(pool: SandboxPool) -> None:
        large = [call(pool, None, work.sleep, 1000.0, size=33 << 20) for _ in range(6)]
        await asyncio.sleep(0.1)
        assert await call(pool, None, work.pid, size=5 << 20)
        for task in large:
            task.cancel()
        await asyncio.gather(*large, return_exceptions=True)
        assert await call(pool, None, work.pid, size=33 << 20)

    run(test)


def test_what_waits_has_its_turn_when_a_child_is_free() -> None:
    """Also one that may not run beside the call that was taken first."""

    async def test(pool: SandboxPool) -> None:
        first = call(pool, "a", work.sleep, 0.3, size=33 << 20)
        await asyncio.sleep(0.1)
        others = [
            call(pool, "a", work.sleep, 0.01),
            call(pool, "b", work.sleep, 0.01, size=33 << 20),
            call(pool, "b", work.sleep, 0.01, size=33 << 20),
            call(pool, "a", work.sleep, 0.01),
        ]
        async with asyncio.timeout(20):
            await asyncio.gather(first, *others)

    run(test)


def test_a_clients_share_of_the_queue_and_of_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_MAX_CALLS_OF_ONE", 2)
    monkeypatch.setattr(pool_module, "_MAX_BYTES", 4 << 20)

    async def test(pool: SandboxPool) -> None:
        tasks = [call(pool, "a", work.sleep, 0.2, size=1 << 20) for _ in range(3)]
        tasks.append(call(pool, "b", work.sleep, 0.2, size=1 << 20))
        tasks.append(call(pool, "c", work.sleep, 0.2, size=2 << 20))
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(result)[:23] if result else None for result in results] == [
            None,
            None,
            "2 large requests of thi",
            None,
            "large requests of 3 MiB",
        ]

    run(test)
