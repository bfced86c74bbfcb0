"""Management of adapters, byte for byte, over scripted engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from lmi_server.http.metrics import Metrics
from lmi_server.http.options import ServerOptions
from lmi_server.models.model_registry import ModelRegistry
from tests.server.fake_engine import FakeEngine
from tests.server.harness import Served, serving_models
from tests.server.management.managed import FakeRegistrar, check, fault, pretty, status
from tests.server.models.test_models import LMI, recipe

ALIAS = {"X-Amzn-SageMaker-Adapter-Alias": "french"}


@asynccontextmanager
async def managed(
    *names: str, registrar: FakeRegistrar | None = None
) -> AsyncIterator[tuple[Served, FakeEngine]]:
    """A server of the model ``first``, which starts with the adapter ``old``, and of others."""
    engine = FakeEngine(
        startup_adapters={"old": Path("/store/first/adapters/old")},
        broken_adapters=frozenset({Path("/broken")}),
    )
    options = ServerOptions(port=0, drain_timeout_s=5)
    recipes = [recipe("first", engine, has_lora=True), *(recipe(n, FakeEngine()) for n in names)]
    models = ModelRegistry(options, Metrics(), recipes, registrar=registrar or FakeRegistrar())
    async with models, serving_models(models) as served:
        yield served, engine


async def answers_with(served: Served, adapter: str) -> bool:
    answer = await served.post({**LMI, "adapters": adapter}, "/predictions/first")
    assert answer.status in (200, 424)
    return answer.status == 200


@pytest.mark.parametrize("prefix", ["", "/models/first"])
def test_register_describe_and_unregister(prefix: str) -> None:
    async def run() -> None:
        async with managed() as (served, engine):
            answer = await served.ask("POST", f"{prefix}/adapters?name=fr&src=/a/fr")
            check(answer, 200, status("Adapter fr registered"))
            assert engine.adapters["fr"] == Path("/a/fr")
            assert await answers_with(served, "fr")

            answer = await served.ask("GET", f"{prefix}/adapters/fr")
            check(answer, 200, pretty({"name": "fr", "src": "/a/fr", "pin": False}))
            answer = await served.ask("POST", f"{prefix}/adapters/fr/update?pin=true")
            check(answer, 200, status("Adapter fr updated"))
            answer = await served.ask("GET", f"{prefix}/adapters/fr")
            check(answer, 200, pretty({"name": "fr", "src": "/a/fr", "pin": True}))

            answer = await served.ask("DELETE", f"{prefix}/adapters/fr")
            check(answer, 200, status("Adapter fr unregistered"))
            assert not await answers_with(served, "fr")
            answer = await served.ask("GET", f"{prefix}/adapters/fr")
            missing = "The adapter fr was not found"
            check(answer, 404, fault(404, "ModelNotFoundException", missing))

    asyncio.run(run())


def test_names_with_slashes_and_aliases() -> None:
    async def run() -> None:
        async with managed() as (served, engine):
            answer = await served.ask(
                "POST", "/adapters?name=org/fr&src=file:///a/fr", headers=ALIAS
            )
            check(answer, 200, status("Adapter french registered"))
            assert engine.adapters["org/fr"] == Path("/a/fr")
            answer = await served.ask("POST", "/adapters/org/fr/update?pin=1", headers=ALIAS)
            check(answer, 200, status("Adapter french updated"))
            answer = await served.ask("DELETE", "/adapters/org/fr", headers=ALIAS)
            check(answer, 200, status("Adapter french unregistered"))
            answer = await served.ask("DELETE", "/adapters/org/fr", headers=ALIAS)
            missing = "The adapter french was not found"
            check(answer, 404, fault(404, "ModelNotFoundException", missing))

    asyncio.run(run())


def test_list_in_pages() -> None:
    async def run() -> None:
        async with managed() as (served, _):
            await served.ask("POST", "/adapters?name=b&src=/b&preload=false")
            await served.ask("POST", "/adapters?name=c&src=/c&pin=true")
            old, b, c = (
                {"name": name, "src": src, "preload": preload, "pin": pin}
                for name, src, preload, pin in (
                    ("old", "/store/first/adapters/old", True, False),
                    ("b", "/b", False, False),
                    ("c", "/c", True, True),
                )
            )
            answer = await served.ask("GET", "/models/first/adapters")
            check(answer, 200, pretty({"adapters": [old, b, c]}))
            answer = await served.ask("GET", "/adapters?limit=2")
            check(answer, 200, pretty({"adapters": [old, b], "nextPageToken": "2"}))
            answer = await served.ask("GET", "/adapters?limit=2&next_page_token=2")
            check(answer, 200, pretty({"adapters": [c]}))
            assert await answers_with(served, "b")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("method", "path", "code", "kind", "message"),
    [
        ("POST", "?name=fr", 400, "BadRequestException", "Parameter src is required."),
        ("POST", "?src=/a", 400, "BadRequestException", "Parameter name is required."),
        (
            "POST",
            "?name=a%0Ab&src=/a",
            400,
            "BadRequestException",
            "Parameter name is 'a\\nb'; it must be 1 to 200 letters, digits and ._:@+=/-, begin "
            "with a letter, a digit or _, and not end with /update",
        ),
        (
            "POST",
            "?name=a/update&src=/a",
            400,
            "BadRequestException",
            "Parameter name is 'a/update'; it must be 1 to 200 letters, digits and ._:@+=/-, "
            "begin with a letter, a digit or _, and not end with /update",
        ),
        (
            "POST",
            "?name=fr&src=/a&scale=2",
            400,
            "BadRequestException",
            "Parameter 'scale' is unknown; known are name, src, preload, pin",
        ),
        (
            "POST",
            "?name=old&src=/a",
            409,
            "BadRequestException",
            "Adapter old is already registered.",
        ),
        (
            "POST",
            "?name=fr&src=/broken",
            424,
            "ModelException",
            "/broken/adapter_config.json is missing",
        ),
        (
            "POST",
            "?name=fr&src=/a&preload=false&pin=true",
            424,
            "ModelException",
            "Can not set preload to false and pin to true",
        ),
        (
            "POST",
            "/old/update?src=/a",
            424,
            "ModelException",
            "Updating adapter path is not supported; unregister the adapter and register it "
            "from /a",
        ),
        (
            "POST",
            "/old/update?pin=maybe",
            400,
            "BadRequestException",
            "Parameter pin is 'maybe'; allowed are true and false",
        ),
        ("POST", "/xx/update", 404, "ModelNotFoundException", "The adapter xx was not found"),
        ("DELETE", "/xx", 404, "ModelNotFoundException", "The adapter xx was not found"),
    ],
)
def test_faults(method: str, path: str, code: int, kind: str, message: str) -> None:
    async def run() -> None:
        async with managed() as (served, engine):
            answer = await served.ask(method, f"/models/first/adapters{path}")
            check(answer, code, fault(code, kind, message))
            assert list(engine.adapters) == ["old"]
            listed = json.loads((await served.ask("GET", "/adapters")).body)
            assert [adapter["name"] for adapter in listed["adapters"]] == ["old"]

    asyncio.run(run())


def test_which_model_is_meant() -> None:
    async def run() -> None:
        async with managed("x", "y:1", "y:2") as (served, _):
            assert (await served.ask("GET", "/models/first/adapters")).status == 200
            for path, code, kind, message in (
                (
                    "/adapters",
                    400,
                    "BadRequestException",
                    "The adapter must be prefixed with a model unless there is only a single "
                    "startup model used.",
                ),
                ("/models/x/adapters", 400, "BadRequestException", "LoRA is not enabled."),
                (
                    "/models/y/adapters",
                    400,
                    "BadRequestException",
                    "The model y has 2 versions; adapters can be managed while a model has one",
                ),
                ("/models/z/adapters", 404, "ModelNotFoundException", "The model z was not found"),
            ):
                check(await served.ask("GET", path), code, fault(code, kind, message))

    asyncio.run(run())


def test_adapters_outlast_the_engine() -> None:
    """Scaled down and up again, a model has the adapters that it had."""

    async def run() -> None:
        async with managed() as (served, engine):
            await served.ask("POST", "/adapters?name=fr&src=/a/fr&pin=true")
            await served.ask("POST", "/adapters?name=gone&src=/a/gone")
            await served.ask("DELETE", "/adapters/old")
            down = await served.ask("PUT", "/models/first?min_worker=0&max_worker=0")
            assert down.status == 200
            answer = await served.ask("GET", "/adapters")
            check(answer, 503, fault(503, "WlmException", "Model is not ready: first"))
            engine.broken_adapters = frozenset({Path("/a/gone")})
            assert (await served.ask("PUT", "/models/first?max_worker=1")).status == 200
            assert engine.adapters == {"fr": Path("/a/fr")}
            listed = json.loads((await served.ask("GET", "/adapters")).body)["adapters"]
            assert [(each["name"], each["pin"]) for each in listed] == [("fr", True)]

    asyncio.run(run())
