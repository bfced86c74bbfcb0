"""A model that another takes the place of while it is asked."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from lmi_server.dialects.lmi import dialect
from lmi_server.models.model import ModelState
from tests.server.fake_engine import FakeEngine
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


def test_what_could_not_be_loaded_is_replaced_as_well() -> None:
    async def run() -> None:
        async with managed() as (served, _):
            lazy = "/models?url=broken&model_name=late&synchronous=false"
            assert (await served.ask("POST", lazy)).status == 202
            late = served.models.find("late")
            await eventually(lambda: late.state is ModelState.FAILED)
            again = await served.ask("POST", "/models?url=broken&model_name=late&replace=true")
            assert (again.status >= 400, late.state) == (True, ModelState.FAILED)
            answer = await served.ask("POST", "/models?url=/m/x&model_name=late&replace=true")
            check(answer, 200, status('Model "late" replaced.'))
            assert (late.state, late.status) == (ModelState.READY, "Healthy")
            assert lmi_text(await served.post(LMI, "/predictions/late")) == " late"

    asyncio.run(run())


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[FakeEngine]:
    """Engines in the order of their ends."""
    engines: list[FakeEngine] = []
    end = FakeEngine.__aexit__

    async def recorded(self: FakeEngine, *exc_info: object) -> None:
        await end(self, *exc_info)
        engines.append(self)

    monkeypatch.setattr(FakeEngine, "__aexit__", recorded)
    return engines


def test_a_request_that_reads_something_before_it_is_run_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, ended: list[FakeEngine]
) -> None:
    goes_on, waits = asyncio.Event(), asyncio.Event()

    async def reads(*_: Any) -> None:
        waits.set()
        await goes_on.wait()

    monkeypatch.setattr(dialect, "answer_in_session", reads)

    async def run() -> None:
        async with managed() as (served, registrar):
            old = served.models.find("first").loaded.backend
            asked = asyncio.create_task(served.post(LMI))
            await waits.wait()
            assert (await served.ask("POST", REPLACE)).status == 200
            await asyncio.sleep(0.02)
            assert ended == []
            goes_on.set()
            assert lmi_text(await asked) == " first"
            await eventually(lambda: ended == [old])
            assert not registrar.engines["first"].requests

    asyncio.run(run())


def test_unregistering_ends_what_was_replaced_as_well(ended: list[FakeEngine]) -> None:
    async def run() -> None:
        async with managed() as (served, registrar):
            old = served.models.find("first").loaded.backend
            old.delay_s = 0.05
            body = {**LMI, "parameters": {"max_new_tokens": 10}}
            asked = asyncio.create_task(served.post(body))
            await eventually(lambda: bool(old.running))
            assert (await served.ask("POST", REPLACE)).status == 200
            assert (await served.ask("DELETE", "/models/first")).status == 200
            assert ended == [old, registrar.engines["first"]]
            assert (await asked).status == 200

    asyncio.run(run())


def adapters(*names: str) -> dict[str, Path]:
    return {name: Path(f"/a/{name}") for name in names}


def test_its_own_adapters_are_served_and_those_that_were_registered() -> None:
    async def run() -> None:
        async with managed(has_lora=True) as (served, registrar):
            old = served.models.find("first").loaded.backend
            for name in ("fr", "both"):
                answer = await served.ask("POST", f"/adapters?name={name}&src=/old/{name}&pin=true")
                assert answer.status == 200
            assert (old.adapters["both"], len(old.adapters)) == (Path("/old/both"), 2)
            registrar.go_on.clear()
            asked = asyncio.create_task(served.ask("POST", REPLACE))
            await eventually(lambda: "first" in registrar.engines)
            new = registrar.engines["first"]
            new.startup_adapters = adapters("de", "both")
            registrar.go_on.set()
            assert (await asked).status == 200
            assert new.adapters == {**adapters("de", "both"), "fr": Path("/old/fr")}
            listed = json.loads((await served.ask("GET", "/adapters")).body)["adapters"]
            assert {one["name"]: one["pin"] for one in listed} == {
                "de": False,
                "both": False,
                "fr": True,
            }
            # The next one has no "de" in its configuration any more.
            assert (await served.ask("POST", REPLACE)).status == 200
            assert registrar.engines["first"].adapters == {"fr": Path("/old/fr")}
            registrar.options["has_lora"] = False
            assert (await served.ask("POST", REPLACE)).status == 200
            answer = await served.ask("GET", "/adapters")
            check(answer, 400, fault(400, "BadRequestException", "LoRA is not enabled."))

    asyncio.run(run())


def test_one_that_fails_after_its_start_is_ended_and_the_log_says_why(
    ended: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with managed(has_lora=True) as (served, registrar):
            old = served.models.find("first").loaded.backend
            assert (await served.ask("POST", "/adapters?name=fr&src=/a/fr")).status == 200

            async def fails(self: FakeEngine, name: str, path: Path) -> None:
                raise OSError("disk on fire")

            monkeypatch.setattr(FakeEngine, "load_adapter", fails)
            answer = await served.ask("POST", f"{REPLACE}&synchronous=false")
            assert answer.status == 202
            await eventually(lambda: ended == [registrar.engines["first"]])
            first = served.models.find("first")
            assert (first.loaded.backend, first.state) == (old, ModelState.READY)
            assert [one.name for one in first.adapters] == ["fr"]
            await eventually(lambda: "could not be replaced: disk on fire" in caplog.text)

    asyncio.run(run())
