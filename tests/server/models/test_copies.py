"""Copies behind one server, from the key to what clients see."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import sys
from typing import Any

import pytest

from lmi_core import _native
from lmi_core.config.targets.launch import prepare
from lmi_core.copies import autoscale
from lmi_core.copies.copies import Copies
from lmi_core.errors import ConfigError
from lmi_server.http.metrics import Metrics
from lmi_server.models import loading
from lmi_server.models.loading import recipe_of, server_options
from lmi_server.models.model_registry import ModelRegistry
from tests.config.cases import NO_CACHE
from tests.copies.test_other_machines import FakeRay, OtherMachines
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


def test_copies_on_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", FakeRay(1.0))
    monkeypatch.setattr(loading, "RayMachines", OtherMachines)
    settings = ("on=ray", "ray_address=10.0.0.1:6379", "num_copies=2")
    small = _native.cpu_info() | {"memory_limit_bytes": 1 << 20}

    async def main() -> None:
        models = registry_of("num_threads=1")
        async with models, serving_models(models) as served:
            reference = await texts(served)
        monkeypatch.setattr(_native, "cpu_info", lambda: small)  # memory is the nodes'
        models = registry_of(*settings)
        async with models, serving_models(models) as served:
            copies = served.models.sole.loaded.backend
            assert isinstance(copies, Copies)
            machines = copies._machines
            assert isinstance(machines, OtherMachines)
            assert (machines.address, len(machines.links)) == ("10.0.0.1:6379", 2)
            streams = asyncio.create_task(texts(served))
            await eventually(lambda: copies.num_tokens > 40, 30)
            machines.links[0].kill()
            assert await streams == reference
            assert (await served.ask("PUT", "/models/model?min_worker=1")).status == 200
            await eventually(lambda: len(copies.copies) == 1, 30)

    asyncio.run(asyncio.wait_for(main(), 100))


def test_ray_has_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else 1)
    with pytest.raises(ConfigError, match=r"option.on=ray needs the 'ray' extra"):
        prepare(deployment_of("on=ray"), NO_CACHE)


def test_copies_by_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoscale, "LOOK_S", 0.02)
    monkeypatch.setattr(autoscale, "RISE_S", 0.05)
    long = body(1)
    long["parameters"]["max_new_tokens"] = 400

    async def main() -> None:
        settings = ("num_copies=1", "maxWorkers=2", "max_idle_time=2", "num_threads=1")
        models = registry_of(*settings, "max_rolling_batch_size=1")
        async with models, serving_models(models) as served:
            copies = served.models.sole.loaded.backend
            streams = [asyncio.create_task(served.post(long)) for _ in range(24)]
            await eventually(lambda: len(copies.copies) == 2, 30)
            answers = await asyncio.gather(*streams)
            assert len({answer.body for answer in answers}) == 1
            await eventually(lambda: len(copies.copies) == 1, 30)
            assert (await served.ask("PUT", "/models/model?min_worker=2")).status == 200
            assert copies.lacks_workers
            await eventually(lambda: len(copies.copies) == 2, 30)

    asyncio.run(asyncio.wait_for(main(), 100))
