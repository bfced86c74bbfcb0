"""Receipts of what a server answers: whose they are, what is in them, what they cost."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lmi_core.receipts.receipt import Receipt, read_receipts
from lmi_server.http.metrics import Metrics
from tests.engine.fake_runner import FakeRunner
from tests.engine.harness import make_engine, until
from tests.server.configured import configured
from tests.server.harness import Served, serving_backend

ROUTES: dict[str, dict[str, Any]] = {
    "/invocations": {"inputs": "hello there", "parameters": {"max_new_tokens": 5}},
    "/generate": {"inputs": "hello there", "parameters": {"max_new_tokens": 5}},
    "/v1/completions": {"model": "model", "prompt": "hello there", "max_tokens": 5, "seed": 3},
}


@asynccontextmanager
async def recording(*settings: str) -> AsyncIterator[Served]:
    """Leaving writes what waits."""
    async with (
        make_engine(FakeRunner(num_blocks=200)) as engine,
        serving_backend(engine, Metrics(), **configured(*settings)) as served,
    ):
        yield served
        if served.models.receipts is not None:
            await asyncio.to_thread(served.models.receipts.close)


def receipts_in(directory: Path) -> list[Receipt]:
    found = [receipt for _, receipt in read_receipts(directory)]
    assert None not in found
    return [receipt for receipt in found if receipt is not None]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_a_tenant_has_its_own(tmp_path: Path) -> None:
    async def run() -> None:
        async with recording(f"record={tmp_path}", "api_keys=first,second") as served:
            for key, number in (("first", 2), ("second", 1)):
                for _ in range(number):
                    body = {**ROUTES["/v1/completions"], "user": "someone"}
                    answer = await served.post(body, "/v1/completions", headers=bearer(key))
                    assert answer.status == 200
            refused = await served.post(ROUTES["/generate"], "/generate", headers=bearer("third"))
            assert refused.status == 401

    asyncio.run(run())
    directories = list(tmp_path.iterdir())
    assert sorted(len(receipts_in(directory)) for directory in directories) == [1, 2]
    for path in tmp_path.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)
        assert "first" not in str(path.relative_to(tmp_path))


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("streams", [False, True])
def test_the_client_sees_nothing_of_it(tmp_path: Path, path: str, streams: bool) -> None:
    async def ask(*settings: str) -> bytes:
        async with recording(*settings) as served:
            body = {**ROUTES[path], "stream": streams}
            answer = await served.post(body, path, headers={"x-request-id": "r"})
            assert answer.status == 200
            return re.sub(rb'"created":[0-9]+', b"", answer.body)

    async def run() -> None:
        assert await ask(f"record={tmp_path}") == await ask()

    asyncio.run(run())
    (receipt,) = receipts_in(tmp_path)
    (choice,) = receipt.choices
    assert len(receipt.prompt_token_ids) == receipt.num_prompt_tokens == len("hello there")
    assert receipt.params["max_new_tokens"] == len(choice.token_ids) == 5
    assert all(logprob is not None and logprob <= 0 for logprob in choice.logprobs)
    assert choice.finish_reason == "length"


def test_a_sampled_request_has_the_seed_that_was_used(tmp_path: Path) -> None:
    async def run() -> None:
        async with recording(f"record={tmp_path}") as served:
            body = {"inputs": "hello", "parameters": {"max_new_tokens": 3, "do_sample": True}}
            assert (await served.post(body)).status == 200

    asyncio.run(run())
    (receipt,) = receipts_in(tmp_path)
    assert isinstance(receipt.params["seed"], int)
    assert receipt.sampling_params().seed == receipt.params["seed"]


def test_what_was_cut_off_is_kept_as_far_as_it_came(tmp_path: Path) -> None:
    async def run() -> None:
        async with recording(f"record={tmp_path}") as served:
            body = {**ROUTES["/generate"], "parameters": {"max_new_tokens": 200}}
            async with served.client.post("/generate_stream", json=body) as response:
                await response.content.readline()
            store = served.models.receipts
            await until(lambda: store.num_kept == 1)

    asyncio.run(run())
    (receipt,) = receipts_in(tmp_path)
    (choice,) = receipt.choices
    assert choice.finish_reason == "abort"
    assert 0 < choice.num_tokens == len(choice.token_ids) < 200
    assert len(receipt.prompt_token_ids) == receipt.num_prompt_tokens > 0


@pytest.mark.parametrize(
    ("settings", "num_kept"),
    [((), 30), (("record_share=0",), 0), (("record_size=2k", "record_files=2"), 0)],
)
def test_what_is_recorded_is_configured(
    tmp_path: Path, settings: tuple[str, ...], num_kept: int
) -> None:
    async def run() -> None:
        async with recording(f"record={tmp_path}", *settings, "record_redact=true") as served:
            for _ in range(30):
                assert (await served.post(ROUTES["/generate"], "/generate")).status == 200

    asyncio.run(run())
    files = list(tmp_path.rglob("*.jsonl"))
    if "record_size=2k" in settings:
        assert len(files) == 2
        assert sum(path.stat().st_size for path in files) <= 2048
        num_kept = len(receipts_in(tmp_path))
        assert 2 <= num_kept < 30
    kept = receipts_in(tmp_path) if files else []
    assert len(kept) == num_kept
    for receipt in kept:
        assert receipt.is_redacted
        assert not receipt.prompt_token_ids
        assert receipt.num_prompt_tokens == 11
        assert [(c.num_tokens, c.token_ids, c.text) for c in receipt.choices] == [(5, [], "")]


def fails(*_: object) -> int:
    raise OSError(28, os.strerror(28))


@pytest.mark.parametrize("is_full", [False, True])
def test_a_disk_that_takes_nothing_costs_the_receipts_alone(
    tmp_path: Path,
    is_full: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    directory = tmp_path / "receipts"
    if is_full:
        monkeypatch.setattr("lmi_core.receipts.store.os.write", fails)
    else:
        directory.write_text("no directory")

    async def run() -> None:
        async with recording(f"record={directory}") as served:
            for _ in range(3):
                answer = await served.post(ROUTES["/generate"], "/generate")
                assert answer.status == 200
                assert json.loads(answer.body)["generated_text"]

    with caplog.at_level(logging.INFO):
        asyncio.run(run())
    said = [record.getMessage() for record in caplog.records if "receipts" in record.getMessage()]
    assert [text for text in said if "dropped: " in text] == [said[0]]
    assert ("No space left" if is_full else "exists") in said[0]
    assert said[-1] == "0 receipts kept, 3 dropped"
