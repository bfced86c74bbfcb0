"""Handlers that fork, end, hang and are killed under load: nobody gets the answer of another."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

from lmi_server.http.metrics import Metrics
from lmi_server.models.custom_code_backend import CustomCodeBackend
from tests.custom_code.harness import write
from tests.server.harness import Served, eventually, serving_backend

HANDLER = """
import os, time
from djl_python import Output

def handle(inputs):
    if inputs.is_empty():
        return None
    body = inputs.get_as_json()
    token, how = body["token"], body["how"]
    if how == "fork":
        os.fork()
    if how == "die":
        os._exit(3)
    if how == "hang":
        time.sleep(600)
    if how == "stream":
        return Output().add_stream_content(pieces(token), None)
    if how == "fork in a stream":
        return Output().add_stream_content(pieces(token, os.fork), None)
    return Output().add(token)

def pieces(token, between=lambda: None):
    yield token[:8]
    between()
    yield token[8:]
"""
NUM_INCIDENTS = 12
_HOWS = ("fork", "die", "hang", "kill", "fork in a stream")
_FAILED = (400, 500, 503)


async def _ask(served: Served, token: str, how: str = "") -> str:
    """What came back: the token itself, "failed", or the wrong text."""
    answer = await served.post({"token": token, "how": how})
    text = answer.body.decode()
    if answer.status == 200:
        return "failed" if "error" in text and token not in text else text
    assert answer.status in _FAILED, (answer.status, text)
    return "failed"


def test_no_answer_goes_to_another_caller(tmp_path: Path) -> None:
    config = replace(
        write(tmp_path, HANDLER),
        min_workers=2,
        max_workers=2,
        retry_threshold=1000,
        predict_timeout_s=1.0,
    )
    seen: dict[str, str] = {}

    async def caller(served: Served, number: int, is_over: asyncio.Event) -> None:
        asked = 0
        while not is_over.is_set():
            token = f"{number:04d}-{asked:06d}-{os.urandom(4).hex()}"
            seen[token] = await _ask(served, token, "stream" if asked % 3 == 2 else "")
            asked += 1
            await asyncio.sleep(0.002)

    async def incident(served: Served, number: int) -> None:
        how, token = _HOWS[number % len(_HOWS)], f"incident-{number:04d}-{os.urandom(4).hex()}"
        if how == "kill":
            await eventually(lambda: backend.pool.num_ready_workers, 60)
            process = next(w._process for w in backend.pool.workers if w._process is not None)
            os.kill(process.pid, signal.SIGKILL)
            return
        seen[token] = await _ask(served, token, how)

    async def run() -> None:
        is_over = asyncio.Event()
        async with backend, serving_backend(backend, Metrics()) as served:
            callers = [asyncio.create_task(caller(served, i, is_over)) for i in range(8)]
            for number in range(NUM_INCIDENTS):
                await incident(served, number)
                num_seen = len(seen)
                await eventually(lambda n=num_seen: len(seen) > n + 16, 60)
            is_over.set()
            await asyncio.gather(*callers)

    backend = CustomCodeBackend(config)
    asyncio.run(run())
    wrong = {token: text for token, text in seen.items() if text not in (token, "failed")}
    assert not wrong
    assert sum(text == token for token, text in seen.items()) > 16 * NUM_INCIDENTS
