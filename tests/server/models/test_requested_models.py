"""Models that requests bring with ``model_url``."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from lmi_core.config.targets.server_config import ServerConfig
from lmi_server.dialects.base import HttpError
from lmi_server.models.registration import ConfiguredRegistrar
from tests.server.harness import eventually
from tests.server.management.managed import managed
from tests.server.models.test_models import COMPLETION, LMI, lmi_text


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/invocations", {"model_name": "x", "model_url": "/m/x"}),
        ("/invocations", {"X-Amzn-SageMaker-Custom-Attributes": "model_name=x;model_url=/m/x"}),
        ("/invocations?model_name=x&model_url=/m/x", {}),
        ("/predictions/x?model_url=/m/x", {}),
    ],
)
def test_a_request_brings_its_model(path: str, headers: dict[str, str]) -> None:
    async def run() -> None:
        async with managed(loads_on_request=True) as (served, registrar):
            assert lmi_text(await served.post(LMI, path, headers=headers)) == " x"
            assert registrar.asked == [{"url": "/m/x", "model_name": "x"}]
            # It is a model like any other now.
            assert lmi_text(await served.post(LMI, "/models/x/invoke")) == " x"
            assert lmi_text(await served.post(LMI)) == " first"
            assert len(registrar.asked) == 1
            assert (await served.ask("DELETE", "/models/x")).status == 200

    asyncio.run(run())


def test_a_form_brings_its_model() -> None:
    async def run() -> None:
        async with managed(loads_on_request=True) as (served, registrar):
            form = {"model_name": "x", "model_url": "/m/x", "engine_name": "Python"}
            async with served.client.post("/invocations", data=form) as answer:
                assert answer.status == 424  # the engine behind it takes no forms
            assert registrar.asked == [{"url": "/m/x", "model_name": "x", "engine": "Python"}]

    asyncio.run(run())


def test_requests_at_the_same_time_wait_for_one_load() -> None:
    async def run() -> None:
        async with managed(loads_on_request=True) as (served, registrar):
            registrar.go_on.clear()
            path = "/invocations?model_name=x&model_url=/m/x"
            posts = [asyncio.create_task(served.post(LMI, path)) for _ in range(5)]
            late = asyncio.create_task(served.post(LMI, "/predictions/x"))
            await eventually(lambda: registrar.asked)
            # Who leaves meanwhile takes nobody along.
            posts.pop().cancel()
            await asyncio.sleep(0.01)
            registrar.go_on.set()
            assert [lmi_text(answer) for answer in await asyncio.gather(*posts, late)] == [" x"] * 5
            assert len(registrar.asked) == 1

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/invocations?model_name=x", 404, "Parameter model_url is required."),
        ("/invocations?model_name=x&model_url=broken", 400, "config.json is missing"),
        ("/invocations?model_name=x&model_url=huge", 507, "the KV cache does not fit"),
    ],
)
def test_what_cannot_be_loaded_leaves_nothing(path: str, status: int, message: str) -> None:
    async def run() -> None:
        async with managed(loads_on_request=True) as (served, _):
            for _ in range(2):
                answer = await served.post(LMI, path)
                assert (answer.status, json.loads(answer.body)["message"]) == (status, message)
            assert [model.name for model in served.models] == ["first"]

    asyncio.run(run())


def test_only_where_a_pattern_says_so_and_only_on_routes_of_lmi() -> None:
    async def run() -> None:
        url = {"model_name": "x", "model_url": "/m/x"}
        async with managed() as (served, registrar):
            assert (await served.post(LMI, headers=url)).status == 404
        async with managed(loads_on_request=True) as (served, _):
            body: dict[str, Any] = {**COMPLETION, "model": "x"}
            answer = await served.post(body, "/v1/completions", headers={"model_url": "/m/x"})
            assert answer.status == 404
        assert not registrar.asked

    asyncio.run(run())


def test_only_the_pattern_counts() -> None:
    arguments = {"url": "s3://yours/x", "model_name": "x"}
    server = ServerConfig(model_url_pattern=r"s3://mine/.*", values={})
    registrar = ConfiguredRegistrar([], {}, server)
    assert registrar.loads_on_request
    with pytest.raises(HttpError, match="Permission denied: s3://yours/x") as raised:
        asyncio.run(registrar.requested_recipe(arguments))
    assert raised.value.status == 404
    mine = asyncio.run(registrar.requested_recipe({**arguments, "url": "s3://mine/x"}))
    assert mine.name == "x"
    assert not ConfiguredRegistrar([], {}, ServerConfig(values={})).loads_on_request
