"""Responses that are stored: gone on from, asked for again, deleted, forgotten."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from lmi_server.dialects.base import HttpError
from lmi_server.dialects.openai.responses_store import ResponseStore, Stored
from tests.server.configured import configured
from tests.server.dialects.openai.test_responses import BODY, TEMPLATE, post
from tests.server.fake_engine import FakeEngine
from tests.server.harness import Answer, Served, serving


async def respond(served: Served, **fields: Any) -> dict[str, Any]:
    key = fields.pop("key", "")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    answer = await served.post({**BODY, **fields}, "/v1/responses", headers=headers)
    body = json.loads(answer.body)
    assert isinstance(body, dict)
    return body


def error_of(answer: Answer) -> tuple[int, str, Any]:
    error = json.loads(answer.body)["error"]
    return answer.status, error["message"], error["param"]


def test_a_response_is_gone_on_from() -> None:
    async def run() -> None:
        async with serving(chat_template=TEMPLATE) as served:
            first = await respond(served, instructions="Be brief")
            second = await respond(served, previous_response_id=first["id"], input="More")
            assert second["previous_response_id"] == first["id"]
            third = await respond(served, previous_response_id=second["id"], input="Last")
            assert third["status"] == "incomplete"
            prompts = [request.prompt for request in served.engine.requests]
            assert prompts == [
                "Nonesystem:Be brief|user:Hi there|A:",
                "Noneuser:Hi there|assistant: a fox|user:More|A:",
                "Noneuser:Hi there|assistant: a fox|user:More|assistant: a fox|user:Last|A:",
            ]

    asyncio.run(run())


def test_a_streamed_one_too_and_after_a_large_body() -> None:
    """What is large is decoded in another process, which has no store: the body, and then the
    conversation that a small one goes on with. (The server's loop is watched.)"""

    async def run() -> None:
        engine = FakeEngine(max_model_len=1 << 20)
        async with serving(engine, chat_template=TEMPLATE) as served:
            items = [{"role": "user", "content": "x"}] * 30_000
            answer = await served.post({**BODY, "stream": True, "input": items}, "/v1/responses")
            last = json.loads(answer.body.split(b"\n\n")[-2].partition(b"data: ")[2])
            first = last["response"]
            more = await respond(served, previous_response_id=first["id"], input=items)
            again = await respond(served, previous_response_id=more["id"])
            assert again["status"] == "incomplete"
            prompt = served.engine.requests[2].prompt or ""
            assert prompt.count("user:x|") == 60_000
            assert prompt.endswith("assistant: a fox|user:Hi there|A:")

    asyncio.run(run())


def test_a_stored_response_is_got_and_deleted() -> None:
    async def run() -> None:
        async with serving(chat_template=TEMPLATE) as served:
            first = await respond(served)
            path = f"/v1/responses/{first['id']}"
            assert json.loads((await served.ask("GET", path)).body) == first
            status, message, param = error_of(await served.ask("GET", f"{path}?stream=true"))
            assert (status, param) == (400, "stream")
            gone = await served.ask("DELETE", path)
            assert json.loads(gone.body) == {
                "id": first["id"],
                "object": "response",
                "deleted": True,
            }
            for method in ("GET", "DELETE"):
                status, message, _ = error_of(await served.ask(method, path))
                assert status == 404
                assert "not found" in message
            missing = await respond(served, previous_response_id=first["id"])
            assert missing["error"]["code"] == "previous_response_not_found"
            assert missing["error"]["param"] == "previous_response_id"

    asyncio.run(run())


def test_what_is_not_to_be_stored_is_not() -> None:
    async def run() -> None:
        async with serving(chat_template=TEMPLATE) as served:
            first = await respond(served, store=False)
            assert first["store"] is False
            assert (await served.ask("GET", f"/v1/responses/{first['id']}")).status == 404

    asyncio.run(run())


def test_a_key_sees_its_own_responses_only() -> None:
    async def run() -> None:
        async with serving(chat_template=TEMPLATE, api_keys=("a", "b")) as served:
            first = await respond(served, key="a")
            path = f"/v1/responses/{first['id']}"
            for key, status in (("b", 404), ("a", 200)):
                headers = {"Authorization": f"Bearer {key}"}
                assert (await served.ask("GET", path, headers=headers)).status == status
            other = await respond(served, key="b", previous_response_id=first["id"])
            assert other["error"]["code"] == "previous_response_not_found"

    asyncio.run(run())


def test_a_store_that_is_off() -> None:
    status, body = post(BODY, response_store_bytes=0)
    assert (status, json.loads(body)["store"]) == (200, False)
    for changes, param in (
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_" + "0" * 32}, "previous_response_id"),
    ):
        status, body = post({**BODY, **changes}, response_store_bytes=0)
        error = json.loads(body)["error"]
        assert (status, error["param"]) == (400, param)
        assert "response_store_size is 0" in error["message"]


def test_the_store_is_bounded() -> None:
    store = ResponseStore(4000)
    one = Stored(b"x" * 100, b"y" * 100)
    assert all(store.put("t", f"r{number}", one) for number in range(3))
    assert store.find("t", "r0") == one
    assert store.put("t", "r3", one)
    kept = [number for number in range(4) if store.find("t", f"r{number}")]
    assert kept == [0, 2, 3]
    assert not store.put("t", "long", Stored(b"", b"y" * 4000))
    store.delete("t", "r0")
    assert store.put("t", "r4", one)
    assert store.find("t", "r2") == one
    with pytest.raises(HttpError, match="not found"):
        store.get("other", "r2")


def test_a_response_that_does_not_fit_says_so() -> None:
    status, body = post({**BODY, "input": "x " * 3000}, **configured("response_store_size=4000"))
    assert (status, json.loads(body)["store"]) == (200, False)
