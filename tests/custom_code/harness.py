"""A handler of the tests, and pools of processes that run it."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmi_core.config.resolve import resolve
from lmi_core.custom_code.call import HandlerAnswer, HandlerRequest
from lmi_core.custom_code.errors import FailureKind, HandlerError
from lmi_core.custom_code.pool import CustomCodePool
from lmi_core.settings.custom_code_config import CustomCodeConfig
from tests.config.cases import CPU, NO_CACHE

WAYS_TO_FAIL = """
import os

def fail(inputs):
    raise ValueError("it is é")

def die(inputs):
    os._exit(3)

def loop(inputs):
    while True:
        pass
"""
"""Functions of handlers, for those that call one by a request's word."""

HANDLER = (
    """
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
    + WAYS_TO_FAIL
)


def write(directory: Path, text: str) -> CustomCodeConfig:
    path = directory / "model.py"
    path.write_text(textwrap.dedent(text))
    return CustomCodeConfig(path=path, model_dir=directory, function="handle")


def configured(directory: Path, text: str, *lines: str) -> CustomCodeConfig:
    """A handler as ``lmi serve`` runs it from ``directory`` with these lines of properties."""
    write(directory, text)
    (directory / "serving.properties").write_text("\n".join(("engine=Python", *lines)))
    (model,) = resolve([str(directory)], NO_CACHE, CPU).models
    config = model.custom_code_config()
    assert config is not None
    return config


@asynccontextmanager
async def running(
    directory: Path, text: str = HANDLER, *lines: str, **fields: Any
) -> AsyncIterator[CustomCodePool]:
    """A pool of what ``lines`` of properties say, or of the defaults, with other ``fields``."""
    config = configured(directory, text, *lines) if lines else write(directory, text)
    pool = CustomCodePool(replace(config, **fields))
    await pool.start()
    pids = [worker._process.pid for worker in pool._workers]
    try:
        yield pool
        assert len(pool.queue) == 0
        assert pool.num_running == 0
    finally:
        await pool.stop()
    assert not [pid for pid in pids if is_alive(pid)]
    assert len(asyncio.all_tasks()) == 1


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def request(text: str, **properties: str) -> HandlerRequest:
    return HandlerRequest(properties=properties, content=[("data", text.encode())])


async def ask(pool: CustomCodePool, text: str, **properties: str) -> HandlerAnswer:
    async with pool.call(request(text, **properties)) as answer:
        return answer


async def kind_of_failure(pool: CustomCodePool, text: str) -> FailureKind:
    with pytest.raises(HandlerError) as raised:
        await ask(pool, text)
    return raised.value.kind


async def read(pool: CustomCodePool, text: str) -> tuple[HandlerAnswer, bytes]:
    async with pool.call(request(text)) as answer:
        assert answer.chunks is not None
        return answer, b"".join([chunk async for chunk in answer.chunks])
