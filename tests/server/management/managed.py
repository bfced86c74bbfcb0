"""A server whose models come and go, over scripted engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from lmi_core.engine.stats import EngineObserver
from lmi_core.errors import InsufficientMemoryError, ModelError
from lmi_server.dialects.base import HttpError
from lmi_server.http.metrics import Metrics
from lmi_server.http.options import ServerOptions
from lmi_server.models.model import Opened, Recipe
from lmi_server.models.model_registry import ModelRegistry
from tests.server.fake_engine import FakeEngine
from tests.server.harness import Answer, Served, serving_models
from tests.server.models.test_models import engine_named, recipe


class FakeRegistrar:
    """Loads whatever is asked for; the URL says how it goes."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.asked: list[Mapping[str, str]] = []
        self.engines: dict[str, FakeEngine] = {}
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.loads_on_request = False

    async def requested_recipe(self, arguments: Mapping[str, str]) -> Recipe:
        return await self.recipe(arguments)

    def adapter_path(self, src: str, model_url: str) -> Path:
        return Path(src.removeprefix("file://"))

    async def recipe(self, arguments: Mapping[str, str]) -> Recipe:
        self.asked.append(arguments)
        url = arguments.get("url")
        if url is None:
            raise HttpError(400, "BadRequestException", "Parameter url is required.")
        name, version = arguments.get("model_name", "inferred"), arguments.get("model_version")
        failures = {
            "broken": ModelError("config.json is missing"),
            "huge": InsufficientMemoryError("the KV cache does not fit"),
            "crash": OSError("disk on fire"),
        }
        options = ServerOptions(model_name=name, model_version=version, **self.options)
        engine = self.engines[name] = engine_named(f" {name}")

        async def open_model(_: EngineObserver) -> Opened:
            await self.go_on.wait()
            if url in failures:
                raise failures[url]
            return Opened(options, engine)

        return Recipe(name=name, version=version, open=open_model, url=url)


@asynccontextmanager
async def managed(
    *, loads_on_request: bool = False, **options: Any
) -> AsyncIterator[tuple[Served, FakeRegistrar]]:
    """A server of the model ``first``, which may load others, also on a request."""
    options = {"port": 0, "drain_timeout_s": 5, **options}
    registrar = FakeRegistrar(**options)
    registrar.loads_on_request = loads_on_request
    models = ModelRegistry(
        ServerOptions(**options),
        Metrics(),
        [recipe("first", engine_named(" first"), **options)],
        registrar=registrar,
    )
    async with models, serving_models(models) as served:
        yield served, registrar


def pretty(value: object) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def status(text: str) -> bytes:
    return pretty({"status": text})


def check(answer: Answer, code: int, body: bytes) -> None:
    assert (answer.status, answer.body) == (code, body)
    assert answer.headers["Content-Type"].startswith("application/json")


def fault(code: int, kind: str, message: str) -> bytes:
    return pretty({"code": code, "type": kind, "message": message})
