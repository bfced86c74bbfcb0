"""Anthropic's message batches by the real ``anthropic`` client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from lmi_core.settings.batch_config import BatchConfig
from tests.server.batches.test_batches import TEMPLATE, client_of
from tests.server.fake_engine import FakeEngine
from tests.server.harness import serving

anthropic: Any = None
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    """Thousands of modules, which workers needn't have that run other tests."""
    global anthropic
    anthropic = pytest.importorskip("anthropic", reason="the anthropic client isn't installed")


def asked(number: int, **fields: Any) -> Any:
    message = {"role": "user", "content": f"Gö {number}"}
    return {
        "custom_id": f"r{number}",
        "params": {"model": "model", "max_tokens": 3, "messages": [message], **fields},
    }


def ended(client: Any, batch_id: str) -> Any:
    until = time.monotonic() + 30
    while (batch := client.messages.batches.retrieve(batch_id)).processing_status != "ended":
        assert time.monotonic() < until, batch
        time.sleep(0.02)
    return batch


def run(
    use: Callable[[Any, openai.OpenAI], None], directory: Path | None, engine: FakeEngine
) -> None:
    async def serve_it() -> None:
        batch = None if directory is None else BatchConfig(directory=directory)
        async with serving(engine, batch=batch, chat_template=TEMPLATE) as served:
            url = f"http://127.0.0.1:{served.port}"
            with (
                anthropic.Anthropic(base_url=url, api_key="k", max_retries=0) as client,
                client_of(served) as other,
            ):
                await asyncio.to_thread(use, client, other)

    asyncio.run(serve_it())


def test_a_batch_from_its_beginning_to_its_end(tmp_path: Path) -> None:
    def use(client: Any, other: openai.OpenAI) -> None:
        batches = client.messages.batches
        requests = [asked(i) for i in range(40)]
        requests += [asked(40, max_tokens=0), asked(41, model="other"), asked(42, stream=True)]
        made = batches.create(requests=requests)
        assert (made.type, made.processing_status) == ("message_batch", "in_progress")
        assert made.request_counts.processing in (0, 43)
        batch = ended(client, made.id)
        counts = batch.request_counts
        assert (counts.succeeded, counts.errored, counts.processing) == (40, 3, 0)
        found = {each.custom_id: each.result for each in batches.results(made.id)}
        assert len(found) == 43
        assert found["r7"].message.content[0].text
        assert found["r40"].error.error.type == "invalid_request_error"
        assert found["r41"].error.error.type == "not_found_error"
        second = batches.create(requests=[asked(0)])
        assert [each.id for each in batches.list(limit=1)] == [second.id, made.id]
        assert [each.id for each in batches.list(before_id=made.id)] == [second.id]
        ended(client, second.id)
        assert other.batches.list().data == []
        with pytest.raises(openai.NotFoundError, match="No such batch"):
            other.batches.retrieve(made.id)
        assert batches.delete(made.id).type == "message_batch_deleted"
        with pytest.raises(anthropic.NotFoundError, match="No such batch"):
            batches.retrieve(made.id)
        batches.delete(second.id)
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]

    run(use, tmp_path, FakeEngine())


def test_async_client(tmp_path: Path) -> None:
    async def tried(url: str) -> None:
        async with anthropic.AsyncAnthropic(base_url=url, api_key="k", max_retries=0) as client:
            batches = client.messages.batches
            made = await batches.create(requests=[asked(i) for i in range(3)])
            while (await batches.retrieve(made.id)).processing_status != "ended":  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            results = [each async for each in await batches.results(made.id)]
            assert {each.custom_id for each in results} == {"r0", "r1", "r2"}
            assert {each.result.type for each in results} == {"succeeded"}
            assert [each.id async for each in batches.list()] == [made.id]
            with pytest.raises(anthropic.BadRequestError, match="can't be cancelled"):
                await batches.cancel(made.id)
            assert (await batches.delete(made.id)).id == made.id

    def use(client: Any, other: openai.OpenAI) -> None:
        asyncio.run(tried(str(client.base_url)))

    run(use, tmp_path, FakeEngine())


def test_what_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    def use(client: Any, _: openai.OpenAI) -> None:
        batches = client.messages.batches
        for requests, message in (
            ([], "requests is empty"),
            ([asked(1), asked(1)], r"requests\[1\]: 'r1' was there before"),
            ([asked(1), {**asked(2), "custom_id": ""}], r"requests\[1\]: custom_id must have"),
            ([{"custom_id": "a"}], r"params"),
        ):
            with pytest.raises(anthropic.BadRequestError, match=message):
                batches.create(requests=requests)
        with pytest.raises(anthropic.BadRequestError, match="limit must be"):
            batches.list(limit=0)
        with pytest.raises(anthropic.BadRequestError, match="after_id names"):
            batches.list(after_id="x")
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]

    run(use, tmp_path, FakeEngine())


def test_cancelled(tmp_path: Path) -> None:
    def use(client: Any, _: openai.OpenAI) -> None:
        batches = client.messages.batches
        made = batches.create(requests=[asked(i) for i in range(60)])
        with pytest.raises(anthropic.BadRequestError, match="cancel it before"):
            batches.delete(made.id)
        with pytest.raises(anthropic.AnthropicError, match="finished processing"):
            batches.results(made.id)
        assert batches.cancel(made.id).processing_status in ("canceling", "ended")
        batch = ended(client, made.id)
        kinds = [each.result.type for each in batches.results(made.id)]
        assert len(kinds) == 60
        assert kinds.count("canceled") == batch.request_counts.canceled > 0
        with pytest.raises(anthropic.BadRequestError, match="can't be cancelled"):
            batches.cancel(made.id)

    run(use, tmp_path, FakeEngine(delay_s=0.05))


def test_where_they_are_off() -> None:
    def use(client: Any, _: openai.OpenAI) -> None:
        with pytest.raises(anthropic.NotFoundError, match="batch_dir"):
            client.messages.batches.list()

    run(use, None, FakeEngine())
