"""A model that another takes the place of while it is asked."""

from __future__ import annotations

import asyncio
import json

import pytest

from lmi_server.models.model import ModelState
from tests.server.harness import eventually
from tests.server.management.managed import check, fault, managed, status
from tests.server.models.test_models import LMI, lmi_text

REPLACE = "/models?url=/m/x&model_name=first&replace=true"


def test_nobody_notices() -> None:
    async def run() -> None:
        async with managed() as (served, registrar):
            old = served.models.find("first").loaded.backend
            old.delay_s = 0.02
            body = {**LMI, "parameters": {"max_new_tokens": 20}}
            answers = [asyncio.create_task(served.post(body)) for _ in range(4)]
            await eventually(lambda: len(old.running) == 4)
            check(await served.ask("POST", REPLACE), 200, status('Model "first" replaced.'))
            new = registrar.engines["first"]
            assert served.models.find("first").loaded.backend is new
            assert len(old.running) == 4
            assert served.models.num_in_flight == 4
            assert lmi_text(await served.post(LMI)) == " first"
            assert not new.running
            assert {answer.status for answer in await asyncio.gather(*answers)} == {200}
            assert {lmi_text(answer.result()) for answer in answers} == {20 * " first"}
            await eventually(lambda: not served.models.find("first")._replaced)
            assert (len(old.requests), len(new.requests)) == (4, 1)
            described = json.loads((await served.ask("GET", "/models/first")).body)
            assert described[0]["models"][0]["modelUrl"] == "/m/x"
            # What isn't there yet is registered.
            answer = await served.ask("POST", "/models?url=/m/y&model_name=y&replace=true")
            check(answer, 200, status('Model "y" registered.'))

    asyncio.run(run())


@pytest.mark.parametrize("url", ["broken", "huge", "crash"])
def test_what_cannot_be_loaded_replaces_nothing(url: str) -> None:
    async def run() -> None:
        async with managed() as (served, _):
            old = served.models.find("first").loaded.backend
            answer = await served.ask("POST", f"/models?url={url}&model_name=first&replace=true")
            assert answer.status in (400, 500, 507)
            first = served.models.find("first")
            assert (first.loaded.backend, first.state) == (old, ModelState.READY)
            assert lmi_text(await served.post(LMI)) == " first"

    asyncio.run(run())


def test_replacing_without_waiting_and_when_the_model_is_away() -> None:
    async def run() -> None:
        async with managed() as (served, registrar):
            registrar.go_on.clear()
            answer = await served.ask("POST", f"{REPLACE}&synchronous=false")
            check(answer, 202, status('Model "first" replacement scheduled.'))
            assert lmi_text(await served.post(LMI)) == " first"
            registrar.go_on.set()
            new = registrar.engines["first"]
            await eventually(lambda: served.models.find("first").loaded.backend is new)
            assert (
                await served.ask("PUT", "/models/first?max_worker=0&min_worker=0")
            ).status == 200
            answer = await served.ask("POST", REPLACE)
            check(answer, 503, fault(503, "WlmException", "Model is not ready: first"))

    asyncio.run(run())
