"""vLLM's routes that load and unload adapters."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.server.harness import Answer, Served, serving
from tests.server.management.test_adapter_management import answers_with, managed


async def load(served: Served, name: str, path: str, **more: Any) -> Answer:
    body = {"lora_name": name, "lora_path": path, **more}
    return await served.post(body, "/v1/load_lora_adapter")


def test_load_and_unload() -> None:
    async def run() -> None:
        async with managed() as (served, engine):
            answer = await load(served, "fr", "/a/fr")
            assert (answer.status, answer.body) == (
                200,
                b"Success: LoRA adapter 'fr' added successfully.",
            )
            assert str(engine.adapters["fr"]) == "/a/fr"
            assert await answers_with(served, "fr")
            assert (await load(served, "fr", "/a/other", load_inplace=True)).status == 200
            assert str(engine.adapters["fr"]) == "/a/other"
            answer = await served.post({"lora_name": "fr"}, "/v1/unload_lora_adapter")
            assert answer.body == b"Success: LoRA adapter 'fr' removed successfully."
            assert not await answers_with(served, "fr")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("load", {"lora_name": "old", "lora_path": "/a"}, 400, "has already been loaded"),
        ("load", {"lora_name": "x", "lora_path": ""}, 400, "must be provided"),
        ("load", {"lora_name": "x"}, 400, "lora_path"),
        ("load", {"lora_name": "a b", "lora_path": "/a"}, 400, "letters, digits"),
        ("load", {"lora_name": "x", "lora_path": "/broken"}, 400, "adapter_config.json is missing"),
        ("unload", {"lora_name": "x"}, 404, "'x' does not exist"),
    ],
)
def test_refusals(path: str, body: dict[str, Any], status: int, message: str) -> None:
    async def run() -> None:
        async with managed() as (served, engine):
            answer = await served.post(body, f"/v1/{path}_lora_adapter")
            assert answer.status == status
            assert message in json.loads(answer.body)["error"]["message"]
            assert list(engine.adapters) == ["old"]

    asyncio.run(run())


def test_it_is_management() -> None:
    async def run() -> None:
        async with serving(host="0.0.0.0") as served:
            answer = await load(served, "fr", "/a/fr")
            assert answer.status == 404
            assert b"is a management route" in answer.body

    asyncio.run(run())
