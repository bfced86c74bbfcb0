"""Copies behind one server, from the key to what clients see."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

import pytest

from lmi_core import _native
from lmi_core.copies.copies import Copies
from lmi_server.http.metrics import Metrics
from lmi_server.models.loading import recipe_of, server_options
from lmi_server.models.model_registry import ModelRegistry
from tests.server.configured import deployment_of
from tests.server.harness import Served, eventually, serving_models

pytestmark = pytest.mark.timeout(120)

SETTINGS = ("kv_cache_bytes=8M", "max_model_len=512", "max_rolling_batch_size=8")


def registry_of(*settings: str) -> ModelRegistry:
    deployment = deployment_of(*SETTINGS, *settings)
    [model] = deployment.models
    recipe = recipe_of(model, deployment.server)
    return ModelRegistry(server_options(deployment.server), Metrics(), [recipe])


def body(number: int) -> dict[str, Any]:
    parameters = {"max_new_tokens": 32, "ignore_eos_token": True, "seed": number, "do_sample": True}
    return {"inputs": f"Hello {number}", "parameters": parameters, "stream": True}


async def texts(served: Served) -> list[str]:
    answers = await asyncio.gather(*(served.post(body(number)) for number in range(8)))
    lines = [[json.loads(line) for line in answer.body.splitlines()] for answer in answers]
    assert {answer.status for answer in answers} == {200}
    assert {len(one) for one in lines} == {32}
    return [one[-1]["generated_text"] for one in lines]


async def workers(served: Served) -> list[Any]:
    described = json.loads((await served.ask("GET", "/models/model")).body)
    [group] = described[0]["models"][0]["workerGroups"]
    return group["workers"]  # type: ignore[no-any-return]


cpu_info, SMALL = _native.cpu_info, {"memory_limit_bytes": 64 << 20}


def test_copies_behind_one_server(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        models = registry_of("num_threads=1")
        async with models, serving_models(models) as served:
            reference = await texts(served)
            refused = await served.ask("PUT", "/models/model?min_worker=2&max_worker=2")
            assert (refused.status, b"option.num_copies" in refused.body) == (400, True)
        models = registry_of("num_threads=1", "num_copies=2")
        async with models, serving_models(models) as served:
            copies = served.models.sole.loaded.backend
            assert isinstance(copies, Copies)
            assert len(await workers(served)) == 2
            streams = asyncio.create_task(texts(served))
            await eventually(lambda: copies.num_tokens > 40, 30)
            os.kill(copies.copies[0].pid, signal.SIGKILL)
            assert await streams == reference
            await eventually(lambda: not copies.lacks_workers, 30)
            assert json.loads((await served.ask("GET", "/ping")).body)["model"] == {
                "status": "Healthy"
            }
            many = await served.ask("PUT", "/models/model?min_worker=1001")
            assert (many.status, b"at most 1000 are allowed" in many.body) == (400, True)
            monkeypatch.setattr(_native, "cpu_info", lambda: cpu_info() | SMALL)
            more = await served.ask("PUT", "/models/model?min_worker=1000")
            assert (more.status, b"1000 copies of the model" in more.body) == (507, True)
            monkeypatch.undo()
            await eventually(lambda: len(copies.copies) == 2, 30)
            assert (await served.ask("PUT", "/models/model?min_worker=1")).status == 200
            await eventually(lambda: len(copies.copies) == 1, 30)
            assert len(await workers(served)) == 1
            metrics = (await served.ask("GET", "/metrics")).body.decode()
            assert 'lmi_finished_requests_total{model_name="model",reason="length"} 8.0' in metrics

    asyncio.run(asyncio.wait_for(main(), 100))
