"""Handlers in real processes: calls, streams, batches, failures, and how many processes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from lmi_core.custom_code.errors import FailureKind, HandlerError
from lmi_core.custom_code.pool import CustomCodePool
from lmi_core.errors import CapacityError, EngineError
from tests.custom_code.harness import (
    HANDLER,
    ask,
    kind_of_failure,
    read,
    request,
    running,
)
from tests.server.harness import eventually


def test_answers(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as pool:
            answer = await ask(pool, "hello")
            assert (answer.code, answer.message, answer.body) == (200, "OK", b"hello")
            assert answer.properties == {"x-calls": "1"}
            assert answer.content_type == "application/octet-stream"
            answer = await ask(pool, "fail")
            assert (answer.code, answer.message) == (424, "prediction failure")
            assert answer.body.decode() == (
                '{\n  "code":424,\n  "message":"prediction failure",\n  "error":"it is é"\n}'
            )
            answer = await ask(pool, "memory")
            assert (answer.code, answer.message, answer.body) == (507, "too much", b"")
            answer = await ask(pool, "number")
            assert b"Invalid output type: <class 'int'>" in answer.body
            answer = await ask(pool, "none")
            assert (answer.code, answer.message, answer.body) == (204, "No content", b"")
            answer = await ask(pool, "refuse")
            assert (answer.code, answer.message) == (418, "teapot")
            assert (await ask(pool, "loud")).body == b"said"
            assert (await ask(pool, "again")).properties == {"x-calls": "8"}

    asyncio.run(run())


def test_configuration_reaches_the_handler(tmp_path: Path) -> None:
    async def run() -> None:
        settings = {"properties": {"a": "1"}, "call_properties": {"model_dir": "/m"}}
        async with running(tmp_path, HANDLER, "option.env=LMI_PROBE=2", **settings) as pool:
            answer = await ask(pool, "configuration", header="h")
            assert json.loads(answer.body) == {
                "init": {"a": "1", "model_dir": "/m"},
                "call": {"header": "h", "model_dir": "/m"},
                "variable": "2",
            }
            assert answer.content_type == "application/json"

    asyncio.run(run())


def test_streams(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as pool:
            answer, body = await read(pool, "stream")
            assert body == b'{"outputs": ["a"]}\n{"outputs": ["\\u00e9"]}\n'
            assert answer.content_type == "application/jsonlines"
            answer, body = await read(pool, "raw")
            assert (answer.code, answer.message, body) == (201, "Made", b"one,two")
            with pytest.raises(EngineError, match="in the middle"):
                await read(pool, "broken")
            with pytest.raises(HandlerError, match=r"disconnected\. \(exit status 3\)"):
                await read(pool, "dying_stream")
            assert (await ask(pool, "back")).body == b"back"

    asyncio.run(run())


def test_a_stream_that_nobody_reads_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with running(tmp_path, max_output_bytes=1000) as pool:
            async with pool.call(request("endless")) as answer:
                assert answer.chunks is not None
                assert await anext(answer.chunks) == b"x" * 400
            assert (await ask(pool, "next")).properties == {"x-calls": "2"}
            assert pool.num_failures == 0

    caplog.set_level("INFO")
    asyncio.run(run())
    assert "stream closed" in caplog.text


def test_too_long_answers(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path, HANDLER, "option.max_output_size=1000") as pool:
            answer = await ask(pool, "huge")
            assert answer.code == 424
            assert b"5000 bytes long, but option.max_output_size allows 1000" in answer.body
            assert len((await ask(pool, "large")).body) == 900

    asyncio.run(run())


def test_a_call_that_takes_too_long(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path, HANDLER, "option.predict_timeout=1") as pool:
            assert await kind_of_failure(pool, "loop") is FailureKind.TIMEOUT
            assert (await ask(pool, "hello")).properties == {"x-calls": "1"}

    asyncio.run(run())


def test_the_pool_fails_after_too_many_failures(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path, HANDLER, "retry_threshold=1") as pool:
            assert await kind_of_failure(pool, "die") is FailureKind.CRASHED
            assert not pool.has_failed
            assert await kind_of_failure(pool, "die") is FailureKind.CRASHED
            await eventually(lambda: pool.has_failed, 20)
            with pytest.raises(CapacityError, match="dead after 2 failures"):
                await ask(pool, "hello")

    asyncio.run(run())


def test_requests_are_refused_while_restarts_pause(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as pool:
            for _ in range(2):
                assert await kind_of_failure(pool, "die") is FailureKind.CRASHED
            await eventually(lambda: pool._is_pausing, 20)
            assert await kind_of_failure(pool, "hello") is FailureKind.STOPPED
            await eventually(lambda: pool.num_ready_workers, 20)
            assert (await ask(pool, "hello")).body == b"hello"

    asyncio.run(run())


def test_batches_keep_their_order_and_their_own_errors(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path, HANDLER, "batch_size=4", "max_batch_delay=5000") as pool:
            texts = ["a", "bad", "c", "d"]
            answers = await asyncio.gather(*(ask(pool, text) for text in texts))
            assert [answer.code for answer in answers] == [200, 424, 200, 200]
            assert [answer.body for answer in answers if answer.code == 200] == [
                *(b"a/4", b"c/4", b"d/4")
            ]
            assert b"no good" in answers[1].body
            assert answers[1].content_type == "application/json"
            assert answers[2].properties == {"x-number": "2"}

    asyncio.run(run())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("raise", {424}),
        ("short", {FailureKind.MISMATCH}),
        ("die", {FailureKind.CRASHED}),
    ],
)
def test_a_batch_that_fails_as_a_whole(tmp_path: Path, text: str, expected: set[Any]) -> None:
    async def outcome(pool: CustomCodePool, text: str) -> Any:
        try:
            return (await ask(pool, text)).code
        except HandlerError as error:
            return error.kind

    async def run() -> None:
        async with running(tmp_path, batch_size=2, max_batch_delay_ms=5000) as pool:
            assert set(await asyncio.gather(outcome(pool, "a"), outcome(pool, text))) == expected

    asyncio.run(run())


def test_a_batch_does_not_wait_for_ever(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path, HANDLER, "batch_size=4", "max_batch_delay=10") as pool:
            assert (await ask(pool, "alone")).body == b"alone"

    asyncio.run(run())


def test_the_queue_is_bounded_and_forgets_who_left(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path, HANDLER, "job_queue_size=1") as pool:
            running_task = asyncio.create_task(ask(pool, "slow"))
            await eventually(lambda: pool.num_running)
            waiting = asyncio.create_task(ask(pool, "waits"))
            await asyncio.sleep(0)
            with pytest.raises(CapacityError, match="job_queue_size"):
                await ask(pool, "one too many")
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            assert len(pool.queue) == 0
            assert (await ask(pool, "echo")).properties == {"x-calls": "2"}
            assert (await running_task).body == b"slow"

    asyncio.run(run())


def test_workers_are_added_while_many_wait(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path, HANDLER, "maxWorkers=2", "max_idle_time=0") as pool:
            await asyncio.gather(*(ask(pool, "slow") for _ in range(6)))
            await eventually(lambda: pool.num_ready_workers == 1, 20)
            assert pool.num_failures == 0

    asyncio.run(run())


def test_coroutines_and_asynchronous_streams(tmp_path: Path) -> None:
    text = """
        import asyncio
        from djl_python import Output

        async def handle(inputs):
            await asyncio.sleep(0)
            if inputs.is_empty():
                return None
            if inputs.get_as_string() == "one":
                return Output().add("one")
            async def items():
                for number in range(3):
                    await asyncio.sleep(0)
                    yield [number]
            return Output().add_stream_content(items())
    """

    async def run() -> None:
        async with running(tmp_path, text) as pool:
            assert (await ask(pool, "one")).body == b"one"
            _, body = await read(pool, "many")
            assert body.count(b"\n") == 3

    asyncio.run(run())


def test_scaling(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as pool:
            pool.scale(2, 2)
            await eventually(lambda: pool.num_ready_workers == 2, 30)
            busy = asyncio.create_task(ask(pool, "slow"))
            await eventually(lambda: pool.num_running == 1)
            pool.scale(1, 1)
            await eventually(lambda: pool.num_ready_workers == 1, 30)
            assert (await busy).body == b"slow"
            pool.scale(0, 1)
            await eventually(lambda: not pool.workers, 30)
            assert (await ask(pool, "hello")).body == b"hello"
            assert pool.num_failures == 0

    asyncio.run(run())
