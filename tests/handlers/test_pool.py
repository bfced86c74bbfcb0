"""Handlers in real processes: calls, streams, batches, failures, restarts; nothing is left over."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmi_core.config.handler_config import HandlerConfig
from lmi_core.errors import CapacityError, EngineError, InsufficientMemoryError, ModelError
from lmi_core.handlers.call import HandlerAnswer, HandlerRequest
from lmi_core.handlers.errors import FailureKind, HandlerError
from lmi_core.handlers.pool import HandlerPool
from tests.server.harness import eventually

HANDLER = """
import os, sys, time
from djl_python import Input, Output

NUM_CALLS = 0
CONFIGURATION = {}

def handle(inputs: Input) -> Output:
    global NUM_CALLS
    if inputs.is_empty():
        CONFIGURATION.update(inputs.get_properties())
        return None
    NUM_CALLS += 1
    if inputs.is_batch():
        return batch(inputs)
    what = inputs.get_as_string()
    return globals().get(what, echo)(inputs)

def echo(inputs):
    return Output().add(inputs.get_as_bytes()).add_property("x-calls", NUM_CALLS)

def configuration(inputs):
    return Output().add_as_json({"init": CONFIGURATION, "call": inputs.get_properties(),
        "variable": os.environ["LMI_PROBE"]})

def batch(inputs):
    output = Output()
    for i, one in enumerate(inputs.get_batches()):
        text = one.get_as_string()
        if text == "die":
            os._exit(3)
        if text == "short":
            return output
        if text == "raise":
            raise ValueError("everything")
        if text == "bad":
            output.error("no good", batch_index=i)
        else:
            output.add(f"{text}/{inputs.get_property('batch_size')}", batch_index=i)
            output.add_property(f"batch_{i}_x-number", i)
    return output

def fail(inputs):
    raise ValueError("it is é")

def memory(inputs):
    raise MemoryError("too much")

def number(inputs):
    return 17

def none(inputs):
    return None

def refuse(inputs):
    return Output().error("not today", code=418, message="teapot")

def leave(inputs):
    sys.exit(5)

def die(inputs):
    os._exit(3)

def loop(inputs):
    while True:
        pass

def huge(inputs):
    return Output().add(b"x" * 5000)

def large(inputs):
    return Output().add(b"x" * 900)

def stream(inputs):
    return Output().add_stream_content(iter([["a"], ["é"]]))

def raw(inputs):
    def items():
        yield "one,"
        yield b"two"
    return Output(201, "Made").add_stream_content(items(), output_formatter=None)

def broken(inputs):
    def items():
        yield ["a"]
        raise ValueError("in the middle")
    return Output().add_stream_content(items())

def endless(inputs):
    def items():
        try:
            while True:
                time.sleep(0.002)
                yield "x" * 400
        finally:
            print("stream closed")
    return Output().add_stream_content(items(), None)

def dying_stream(inputs):
    def items():
        yield "a"
        os._exit(3)
    return Output().add_stream_content(items(), None)

def slow(inputs):
    time.sleep(0.3)
    return Output().add("slow")

def loud(inputs):
    print("p" * 20000)
    print("to the log", file=sys.stderr)
    return Output().add("said")
"""


def write(directory: Path, text: str) -> HandlerConfig:
    path = directory / "model.py"
    path.write_text(textwrap.dedent(text))
    return HandlerConfig(path=path, model_dir=directory, function="handle")


@asynccontextmanager
async def running(
    directory: Path, text: str = HANDLER, **fields: Any
) -> AsyncIterator[HandlerPool]:
    pool = HandlerPool(replace(write(directory, text), **fields))
    await pool.start()
    pids = [worker._process.pid for worker in pool._workers]
    try:
        yield pool
        assert len(pool.queue) == 0
        assert pool.num_running == 0
    finally:
        await pool.stop()
    assert not [pid for pid in pids if _is_alive(pid)]
    assert len(asyncio.all_tasks()) == 1


def _is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def request(text: str, **properties: str) -> HandlerRequest:
    return HandlerRequest(properties=properties, content=[("data", text.encode())])


async def ask(pool: HandlerPool, text: str, **properties: str) -> HandlerAnswer:
    async with pool.call(request(text, **properties)) as answer:
        return answer


async def kind_of_failure(pool: HandlerPool, text: str) -> FailureKind:
    with pytest.raises(HandlerError) as raised:
        await ask(pool, text)
    return raised.value.kind


async def read(pool: HandlerPool, text: str) -> tuple[HandlerAnswer, bytes]:
    async with pool.call(request(text)) as answer:
        assert answer.chunks is not None
        return answer, b"".join([chunk async for chunk in answer.chunks])


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
        async with running(tmp_path, env={"LMI_PROBE": "2"}, **settings) as pool:
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
        async with running(tmp_path, max_output_bytes=1000) as pool:
            answer = await ask(pool, "huge")
            assert answer.code == 424
            assert b"5000 bytes long, but option.max_output_size allows 1000" in answer.body
            assert len((await ask(pool, "large")).body) == 900

    asyncio.run(run())


@pytest.mark.parametrize(("text", "why"), [("die", "exit status 3"), ("leave", "exit status 5")])
def test_death_fails_the_request_and_restarts(tmp_path: Path, text: str, why: str) -> None:
    async def run() -> None:
        async with running(tmp_path) as pool:
            with pytest.raises(HandlerError, match=why) as raised:
                await ask(pool, text)
            assert raised.value.kind is FailureKind.CRASHED
            assert (await ask(pool, "hello")).properties == {"x-calls": "1"}

    asyncio.run(run())


def test_death_of_an_idle_process_is_noticed(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as pool:
            (worker,) = pool._workers
            os.kill(worker._process.pid, 9)
            await eventually(lambda: pool.num_failures, 20)
            assert (await ask(pool, "hello")).body == b"hello"

    asyncio.run(run())


def test_a_call_that_takes_too_long(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path, predict_timeout_s=0.3) as pool:
            assert await kind_of_failure(pool, "loop") is FailureKind.TIMEOUT
            assert (await ask(pool, "hello")).properties == {"x-calls": "1"}

    asyncio.run(run())


def test_the_pool_fails_after_too_many_failures(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path, retry_threshold=1) as pool:
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
        async with running(tmp_path, batch_size=4, max_batch_delay_ms=5000) as pool:
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
    async def outcome(pool: HandlerPool, text: str) -> Any:
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
        async with running(tmp_path, batch_size=4, max_batch_delay_ms=10) as pool:
            assert (await ask(pool, "alone")).body == b"alone"

    asyncio.run(run())


def test_the_queue_is_bounded_and_forgets_who_left(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path, max_queue_size=1) as pool:
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
        async with running(tmp_path, max_workers=2, max_idle_time_s=0) as pool:
            await asyncio.gather(*(ask(pool, "slow") for _ in range(6)))
            await eventually(lambda: pool.num_ready_workers == 1, 20)
            assert pool.num_failures == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import not_here\ndef handle(inputs): ...", "No module named 'not_here'"),
        ("import djl_python.huggingface\ndef handle(inputs): ...", "lmi_core import Engine"),
        ("def handle(inputs): raise ValueError('no weights')", "ValueError: no weights"),
        (
            "from djl_python import Output\ndef handle(i): return Output().error('refused')",
            "refused",
        ),
        ("import os\nos._exit(7)", "exit status 7"),
        ("import time\ntime.sleep(60)", "was not loaded within 1 s"),
    ],
)
def test_loading_fails(tmp_path: Path, text: str, message: str) -> None:
    async def run() -> None:
        with pytest.raises(ModelError, match="Failed to initialize model: ") as raised:
            async with running(tmp_path, text, loading_timeout_s=1.0 if "sleep" in text else 60.0):
                pass
        assert message in str(raised.value)
        assert len(asyncio.all_tasks()) == 1

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


def test_what_a_handler_has_started_ends_with_it(tmp_path: Path) -> None:
    text = """
        import subprocess
        from djl_python import Output
        CHILD = subprocess.Popen(["sleep", "1000"])

        def handle(inputs):
            return None if inputs.is_empty() else Output().add(str(CHILD.pid))
    """

    async def run() -> int:
        async with running(tmp_path, text) as pool:
            return int((await ask(pool, "pid")).body)

    pid = asyncio.run(run())
    # A signal was sent; a busy machine takes its time to end what it was sent to.
    deadline = time.monotonic() + 30
    while _is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_installed_djl_python_is_left_alone(tmp_path: Path) -> None:
    package = tmp_path / "djl_python"
    package.mkdir()
    (package / "__init__.py").write_text(
        "class Output:\n"
        "    def __init__(self):\n"
        "        self.code, self.message, self.properties = 200, 'OK', {}\n"
        "        self.content = {'data': b'from theirs'}\n"
    )
    text = """
        from djl_python import Output

        def handle(inputs):
            return None if inputs.is_empty() else Output()
    """

    async def run() -> None:
        async with running(tmp_path, text) as pool:
            answer = await ask(pool, "x")
            assert (answer.body, answer.content_type) == (b"from theirs", None)

    asyncio.run(run())


def test_death_is_noticed_although_a_fork_holds_the_socket(tmp_path: Path) -> None:
    text = """
        import os, time
        from djl_python import Output

        def handle(inputs):
            if inputs.is_empty():
                return None
            if os.fork() == 0:
                time.sleep(1000)
            os._exit(4)
    """

    async def run() -> None:
        async with running(tmp_path, text) as pool:
            assert await kind_of_failure(pool, "x") is FailureKind.CRASHED

    asyncio.run(run())


def test_another_interpreter(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nLMI_PROBE=9 exec {sys.executable} "$@"\n')
    script.chmod(0o755)

    async def run() -> None:
        async with running(tmp_path, python=str(script)) as pool:
            assert json.loads((await ask(pool, "configuration")).body)["variable"] == "9"
        with pytest.raises(ModelError, match="/no/python can't be started"):
            await HandlerPool(replace(pool.config, python="/no/python")).start()

    asyncio.run(run())


def test_no_file_or_process_is_left_open(tmp_path: Path) -> None:
    def num_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    async def run() -> None:
        before = num_files()
        async with running(tmp_path) as pool:
            while_running = num_files()
            for text in ("a", "stream", "die", "b"):
                with contextlib.suppress(HandlerError):
                    async with pool.call(request(text)):
                        pass
            await eventually(lambda: pool.num_ready_workers == 1, 20)
            await eventually(lambda: num_files() == while_running)
        await eventually(lambda: num_files() == before)

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


def test_too_little_memory_to_load(tmp_path: Path) -> None:
    text = "def handle(inputs): raise MemoryError('17 GiB')"

    async def run() -> None:
        with pytest.raises(InsufficientMemoryError, match="17 GiB"):
            async with running(tmp_path, text):
                pass

    asyncio.run(run())
