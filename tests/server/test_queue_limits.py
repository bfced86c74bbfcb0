"""How long a request may wait for its first step, said in it: ``max_queue_s`` in every protocol."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from lmi_core.text.chat import ChatTemplate
from lmi_server.dialects.tgi.options import TgiOptions
from tests.engine.fake_runner import FakeRunner
from tests.server.dialects.tgi.test_tgi_http import serving
from tests.server.harness import Answer, eventually

TEMPLATE = ChatTemplate({"default": "{% for m in messages %}{{ m.content }}{% endfor %}"})
MESSAGES = {"model": "model", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
PROMPT = {"model": "model", "prompt": "x", "max_tokens": 2}
INPUTS = {"inputs": "x", "parameters": {"max_new_tokens": 2}}
RESPONSE = {"model": "model", "input": "x", "max_output_tokens": 2, "store": False}
FORMS: list[tuple[str, dict[str, Any], int, int]] = [
    ("/invocations", INPUTS, 503, 424),
    ("/invocations", {**INPUTS, "stream": True}, 503, 424),
    ("/invocations", MESSAGES, 503, 424),
    ("/invocations", PROMPT, 503, 424),
    ("/v1/completions", {**PROMPT, "prompt": ["x"]}, 429, 400),
    ("/v1/completions", {**PROMPT, "stream": True}, 429, 400),
    ("/v1/chat/completions", MESSAGES, 429, 400),
    ("/v1/responses", RESPONSE, 429, 400),
    ("/v1/messages", MESSAGES, 429, 400),
    ("/generate", INPUTS, 429, 422),
    ("/generate_stream", INPUTS, 200, 200),
    ("/", INPUTS, 429, 422),
    ("/tgi/v1/chat/completions", MESSAGES, 429, 422),
    ("/tgi/v1/completions", PROMPT, 429, 422),
]
"""Routes, bodies, and the statuses of who waited too long and of what is no time."""


def within(body: dict[str, Any], seconds: float) -> dict[str, Any]:
    if "parameters" in body:
        return {**body, "parameters": {**body["parameters"], "max_queue_s": seconds}}
    return {**body, "max_queue_s": seconds}


def test_who_may_not_wait_is_refused_where_another_runs() -> None:
    """And answered where none does, or where it may wait."""
    answers: dict[int, list[Answer]] = {}

    async def run() -> None:
        may_end = threading.Event()
        may_end.set()
        runner = FakeRunner(max_num_seqs=1, max_model_len=128)
        runner.fail_step = lambda number: "" if may_end.wait(20) else "nobody let it end"
        options: dict[str, Any] = {"tgi": TgiOptions(), "chat_template": TEMPLATE}
        async with serving(runner, api="lmi", **options) as served:
            engine: Any = served.engine
            answers.update({i: [] for i in range(len(FORMS))})

            async def ask(index: int, seconds: float) -> None:
                path, body, *_ = FORMS[index]
                answers[index].append(await served.post(within(body, seconds), path))

            for index in range(len(FORMS)):
                await ask(index, 0)
                await ask(index, -0.5)
            may_end.clear()
            first = asyncio.create_task(served.post(PROMPT, "/v1/completions"))
            await eventually(lambda: engine.stats().num_running == 1)
            waiting = [asyncio.create_task(ask(index, 0.01)) for index in range(len(FORMS))]
            await eventually(lambda: engine.stats().num_waiting >= len(FORMS))
            patient = asyncio.create_task(served.post(within(PROMPT, 60), "/v1/completions"))
            await eventually(lambda: engine.stats().num_waiting >= len(FORMS) + 1)
            await asyncio.sleep(0.02)
            may_end.set()
            await asyncio.gather(*waiting)
            assert (await first).status == (await patient).status == 200

    asyncio.run(run())
    for (path, body, late, wrong), (idle, negative, waited) in zip(
        FORMS, answers.values(), strict=True
    ):
        assert idle.status == 200, (path, body, idle.body)
        assert negative.status == wrong, (path, negative.body)
        assert b"max_queue_s" in negative.body
        assert waited.status == late, (path, body, waited.body)
        if path.startswith("/v1") or path == "/invocations":
            assert b"may wait 0.01 (max_queue_s)" in waited.body
        else:
            assert b"overloaded" in waited.body
        if path in ("/v1/chat/completions", "/invocations"):
            assert waited.headers["Retry-After"] == "1"
    assert json.loads(answers[0][1].body)["error"].startswith("parameters.max_queue_s must be at")


@pytest.mark.parametrize("value", ["soon", True, [1], 1e999])
def test_what_is_no_time_is_refused(value: Any) -> None:
    async def run() -> Answer:
        async with serving(FakeRunner(), api="lmi", chat_template=TEMPLATE) as served:
            return await served.post(within(MESSAGES, value), "/v1/chat/completions")

    answer = asyncio.run(run())
    assert answer.status == 400
