"""A handler's process: loading, death, what it started; nothing is left over."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from lmi_core.custom_code import process
from lmi_core.custom_code.errors import FailureKind, HandlerError
from lmi_core.custom_code.pool import CustomCodePool
from lmi_core.errors import InsufficientMemoryError, ModelError
from tests.custom_code.harness import (
    HANDLER,
    ask,
    is_alive,
    kind_of_failure,
    read,
    request,
    running,
)
from tests.server.harness import eventually


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
    ],
)
def test_loading_fails(tmp_path: Path, text: str, message: str) -> None:
    async def run() -> None:
        with pytest.raises(ModelError, match="Failed to initialize model: ") as raised:
            async with running(tmp_path, text, loading_timeout_s=60.0):
                pass
        assert message in str(raised.value)
        assert len(asyncio.all_tasks()) == 1

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
    while is_alive(pid):
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


def test_loading_has_a_limit(tmp_path: Path) -> None:
    text = "import time\ndef handle(inputs): time.sleep(60)"

    async def run() -> None:
        with pytest.raises(ModelError, match="was not loaded within 1 s"):
            async with running(tmp_path, text, "option.model_loading_timeout=1"):
                pass

    asyncio.run(run())


def test_another_interpreter(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nLMI_PROBE=9 exec {sys.executable} "$@"\n')
    script.chmod(0o755)

    async def run() -> None:
        async with running(tmp_path, HANDLER, f"option.pythonExecutable={script}") as pool:
            assert json.loads((await ask(pool, "configuration")).body)["variable"] == "9"
        with pytest.raises(ModelError, match="/no/python can't be started"):
            await CustomCodePool(replace(pool.config, python="/no/python")).start()

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


def test_too_little_memory_to_load(tmp_path: Path) -> None:
    text = "def handle(inputs): raise MemoryError('17 GiB')"

    async def run() -> None:
        with pytest.raises(InsufficientMemoryError, match="17 GiB"):
            async with running(tmp_path, text):
                pass

    asyncio.run(run())


def test_what_a_call_has_forked_answers_nobody(tmp_path: Path) -> None:
    text = """
        import os
        from djl_python import Output

        def handle(inputs):
            if inputs.is_empty():
                return None
            text = inputs.get_as_string()
            if text == "stream":
                return Output().add_stream_content(iter(["a", "b"]), lambda item: item + _fork())
            _fork()
            return Output().add(text)

        def _fork():
            os.fork()
            return ""
    """

    async def run() -> None:
        async with running(tmp_path, text) as pool:
            for number in range(5):
                assert (await ask(pool, str(number))).body == str(number).encode()
            assert (await read(pool, "stream"))[1] == b"ab"
            assert (await ask(pool, "last")).body == b"last"
            assert pool.num_failures == 0

    asyncio.run(run())


def test_a_process_that_answers_another_call_is_ended(tmp_path: Path) -> None:
    text = """
        from djl_python import Output
        from lmi_core.custom_code import child

        def handle(inputs):
            if inputs.is_empty():
                return None
            text = inputs.get_as_string()
            if text == "twice":
                once = child.encode_frame
                def twice(head, blobs):
                    child.encode_frame = once
                    return once(head, blobs) * 2
                child.encode_frame = twice
            return Output().add(text)
    """

    async def run() -> None:
        async with running(tmp_path, text) as pool:
            assert (await ask(pool, "twice")).body == b"twice"
            with pytest.raises(HandlerError, match="answered another call"):
                await ask(pool, "next")
            assert (await ask(pool, "after")).body == b"after"
            assert pool.num_failures == 1

    asyncio.run(run())


@pytest.mark.parametrize(
    ("expression", "error"),
    [
        ("Output('teapot')", "'teapot' is not a whole number"),
        ("Output(200.5)", "200.5 is not a whole number"),
        ("Output(None)", "None is not a whole number"),
        ("Output().error('x', code=[], batch_index=0)", "[] is not a whole number"),
        ("Output('no').add_stream_content(iter(['a']))", "'no' is not a whole number"),
        ("Output().add('x', key=Unwritable())", "no text"),
    ],
)
def test_an_output_that_cannot_be_written_fails_alone(
    tmp_path: Path, expression: str, error: str
) -> None:
    text = f"""
        from djl_python import Output

        class Unwritable:
            def __str__(self):
                raise ValueError("no text")

        def handle(inputs):
            if inputs.is_empty():
                return None
            return {expression} if inputs.get_as_string() == "bad" else Output().add("good")
    """

    async def run() -> None:
        async with running(tmp_path, text) as pool:
            answer = await ask(pool, "bad")
            assert (answer.code, answer.chunks) == (424, None)
            assert error in json.loads(answer.body)["error"]
            assert (await ask(pool, "next")).body == b"good"
            assert pool.num_failures == 0

    asyncio.run(run())


def test_what_a_handler_prints_moves_no_cursor(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = r"""
        from djl_python import Output

        def handle(inputs):
            print("\x1b[2J\x1b[31mred\rover \x9b1m \u202e end")
            return None if inputs.is_empty() else Output().add("x")
    """

    async def run() -> None:
        async with running(tmp_path, text) as pool:
            await ask(pool, "x")

    caplog.set_level("INFO")
    asyncio.run(run())
    assert r"stdout: \x1b[2J\x1b[31mred\rover \x9b1m \u202e end" in caplog.text
    assert all(record.getMessage().isprintable() for record in caplog.records)


def test_secrets_of_the_server_are_not_inherited(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
        import os
        from djl_python import Output

        def handle(inputs):
            names = ("SERVING_ADMIN_KEY", "HF_TOKEN", "LMI_PROBE")
            return None if inputs.is_empty() else Output().add(str([os.getenv(n) for n in names]))
    """
    monkeypatch.setenv("SERVING_ADMIN_KEY", "hunter2")
    monkeypatch.setenv("HF_TOKEN", "hub")

    async def run() -> None:
        settings = {"withheld": ("SERVING_ADMIN_KEY",), "env": {"LMI_PROBE": "1"}}
        async with running(tmp_path, text, **settings) as pool:
            assert (await ask(pool, "x")).body == b"[None, 'hub', '1']"

    caplog.set_level("INFO")
    asyncio.run(run())
    assert "its code doesn't get SERVING_ADMIN_KEY (option.handler_environment)" in caplog.text


DAEMON = """
import os, subprocess
from djl_python import Output
def handle(inputs):
    if inputs.get_as_string() == "daemon":
        child = subprocess.Popen(["sleep", "60"], start_new_session=True)
        open(os.path.join(os.path.dirname(__file__), "daemon"), "w").write(str(child.pid))
        os._exit(3)
    return Output().add("alive")
"""


def test_a_daemon_that_holds_the_output_does_not_hold_the_restart(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path, DAEMON) as pool:
            with pytest.raises(HandlerError, match="exit status 3"):
                await ask(pool, "daemon")
            async with asyncio.timeout(30):
                assert (await ask(pool, "hello")).body == b"alive"

    try:
        asyncio.run(run())
    finally:
        os.kill(int((tmp_path / "daemon").read_text()), 9)


def test_a_flood_of_lines_leaves_the_loop_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    turn = 0
    logged: list[int] = []
    monkeypatch.setattr(process, "_log_line", lambda *line: logged.append(turn))

    async def run() -> None:
        async def count() -> None:
            nonlocal turn
            while True:
                turn += 1
                await asyncio.sleep(0)

        counter = asyncio.create_task(count())
        stream = asyncio.StreamReader()
        stream.feed_data(b"\n" * 5000 + b"end")
        stream.feed_eof()
        await process.log_output(stream, 20, "x", lambda: True)
        counter.cancel()

    asyncio.run(run())
    assert len(logged) == 5001
    assert max(Counter(logged).values()) <= 100
