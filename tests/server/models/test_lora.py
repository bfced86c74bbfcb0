"""Adapters that requests name, in each protocol's way, over a scripted engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmi_core.engine.engine import Engine
from lmi_core.engine.outputs import TokenEvent
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.stream import EventStream
from lmi_core.text.chat import ChatTemplate
from lmi_server.dialects.lmi.options import LmiOptions
from lmi_server.dialects.lmi.release import Release
from lmi_server.dialects.tgi.options import TgiOptions
from lmi_server.http.metrics import Metrics
from lmi_server.http.options import ServerOptions
from lmi_server.models.model_registry import ModelRegistry
from tests.engine.harness import make_engine
from tests.server.fake_engine import FakeEngine
from tests.server.harness import Answer, Served, serving, serving_backend, serving_models
from tests.server.models.test_models import COMPLETION, engine_named, recipe

TEMPLATE = ChatTemplate({"default": "{% for m in messages %}{{ m.content }}{% endfor %}"})
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
IDENTIFIER = "X-Amzn-SageMaker-Adapter-Identifier"
ALIAS = "X-Amzn-SageMaker-Adapter-Alias"
ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"


@asynccontextmanager
async def with_adapters(*names: str, **options: Any) -> AsyncIterator[Served]:
    engine = FakeEngine(adapters={name: Path(f"/adapters/{name}") for name in names})
    options = {"chat_template": TEMPLATE, "has_lora": True, **options}
    async with serving(engine, **options) as served:
        yield served


def ask(
    body: Mapping[str, Any],
    path: str = "/invocations",
    headers: Mapping[str, str] | None = None,
    **options: Any,
) -> tuple[Answer, list[str]]:
    """The answer of a model with the adapters ``fr`` and ``de``, and the adapters that ran."""

    async def run() -> tuple[Answer, list[str]]:
        async with with_adapters("fr", "de", **options) as served:
            answer = await served.post(body, path, headers=headers or {})
            return answer, [request.adapter for request in served.engine.requests]

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "adapters"),
    [
        ({"inputs": "x"}, [""]),
        ({"inputs": "x", "adapters": "fr"}, ["fr"]),
        ({"inputs": "x", "adapters": ["de"]}, ["de"]),
        ({"inputs": ["x", "y", "z"], "adapters": ["fr", "", "de"]}, ["fr", "", "de"]),
        ({"inputs": ["x", "y"], "adapters": []}, ["", ""]),
        ({"inputs": "x", "adapters": "fr", "stream": True}, ["fr"]),
        ({**CHAT, "adapters": "fr"}, ["fr"]),
        ({**CHAT, "model": "de"}, ["de"]),
        ({**CHAT, "model": "de", "adapters": "fr"}, ["fr"]),
        ({**CHAT, "model": "other"}, [""]),
        ({"prompt": "x", "adapters": "fr"}, ["fr"]),
        ({"prompt": ["x", "y"], "model": "fr"}, ["fr", "fr"]),
    ],
)
def test_lmi_bodies(body: dict[str, Any], adapters: list[str]) -> None:
    answer, ran = ask(body)
    assert answer.status == 200
    assert sorted(ran) == sorted(adapters)
    assert "x-lmi-ignored-parameters" not in answer.headers
    if "inputs" not in body:
        assert json.loads(answer.body)["model"] == (adapters[0] or "model")


def test_each_prompt_runs_with_its_own_adapter() -> None:
    async def run() -> None:
        async with with_adapters("fr", "de") as served:
            await served.post({"inputs": ["one", "two"], "adapters": ["de", "fr"]})
            ran = {request.prompt: request.adapter for request in served.engine.requests}
            assert ran == {"one": "de", "two": "fr"}

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "headers", "in_body", "adapters"),
    [
        ("", {IDENTIFIER: "fr"}, None, ["fr", "fr"]),
        ("", {IDENTIFIER: "fr"}, ["de", "de"], ["fr", "fr"]),
        ("", {IDENTIFIER: "fr", "adapter": "de"}, None, ["fr", "fr"]),
        ("", {"adapter": "de"}, ["fr", ""], ["de", "de"]),
        ("", {ATTRIBUTES: "x=1; adapter=de"}, None, ["de", "de"]),
        ("?adapter=de", {}, ["fr", "fr"], ["de", "de"]),
        ("?adapter=de", {"adapter": "fr"}, None, ["fr", "fr"]),
        ("", {IDENTIFIER: ""}, ["de", ""], ["de", ""]),
    ],
)
def test_lmi_names_beside_the_body(
    path: str, headers: dict[str, str], in_body: list[str] | None, adapters: list[str]
) -> None:
    answer, ran = ask({"inputs": ["x", "y"], "adapters": in_body}, f"/invocations{path}", headers)
    assert (answer.status, sorted(ran)) == (200, sorted(adapters))


@pytest.mark.parametrize(
    ("release", "status", "text"),
    [
        (None, 424, "Adapter xx is not registered; registered are 'fr', 'de'"),
        (Release.V0_24, 424, "Unknown or invalid adapter xx"),
        (Release.V0_27, 200, "Unknown or invalid adapter xx"),
        (Release.V0_28, 200, "Adapter xx is not registered"),
        (Release.V0_29, 424, "Adapter xx is not registered"),
    ],
)
def test_lmi_adapters_that_are_not_there(release: Release | None, status: int, text: str) -> None:
    lmi = LmiOptions(release=release)
    for body, headers in (({"adapters": "xx"}, {}), ({"adapters": "fr"}, {IDENTIFIER: "xx"})):
        answer, ran = ask({"inputs": "x", **body}, headers=headers, lmi=lmi)
        assert (answer.status, ran) == (status, [])
        assert json.loads(answer.body) == {"code": 424, "error": text}


def test_lmi_messages_have_the_alias() -> None:
    answer, _ = ask({"inputs": "x"}, headers={IDENTIFIER: "a-17", ALIAS: "french"})
    assert json.loads(answer.body)["error"].startswith("Adapter french is not registered")


@pytest.mark.parametrize("inputs", ["x", ["x", "y", "z"]])
def test_lmi_needs_an_adapter_for_every_input(inputs: Any) -> None:
    answer, ran = ask({"inputs": inputs, "adapters": ["fr", "de"]})
    assert (answer.status, ran) == (424, [])
    assert b"Number of adapters is not equal to the number of inputs" in answer.body


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", {"prompt": ["a", "b"]}), ("/v1/chat/completions", CHAT)],
)
def test_openai_names_an_adapter_as_the_model(path: str, body: dict[str, Any]) -> None:
    for model, adapter in (("fr", "fr"), ("model", ""), (None, "")):
        answer, ran = ask({**body, "model": model}, path)
        assert (answer.status, set(ran)) == (200, {adapter})
        assert json.loads(answer.body)["model"] == (model or "model")
    answer, ran = ask({**body, "model": "xx"}, path)
    error = json.loads(answer.body)["error"]
    assert (answer.status, error["code"], ran) == (404, "model_not_found", [])
    assert error["message"] == (
        "The model 'xx' does not exist; 'model', 'fr', 'de' are served here"
    )


def test_openai_lists_adapters_with_their_model() -> None:
    async def run() -> None:
        async with with_adapters("fr") as served:
            listed = json.loads((await served.ask("GET", "/v1/models")).body)["data"]
            assert [card["id"] for card in listed] == ["model", "fr"]
            base, adapter = listed
            assert "parent" not in base
            assert (adapter["root"], adapter["parent"]) == ("/adapters/fr", "model")
            assert json.loads((await served.ask("GET", "/v1/models/fr")).body) == adapter
            body = {"prompt": "some words", "model": "fr"}
            assert (await served.post(body, "/tokenize")).status == 200

    asyncio.run(run())


def test_of_several_models_the_one_with_the_adapter_answers() -> None:
    async def run() -> None:
        engine = FakeEngine(text=" B", startup_adapters={"fr": Path("/fr")})
        recipes = [recipe("a", engine_named(" A")), recipe("b", engine, has_lora=True)]
        models = ModelRegistry(ServerOptions(port=0, drain_timeout_s=0.2), Metrics(), recipes)
        async with models, serving_models(models) as served:
            answer = await served.post({**COMPLETION, "model": "fr"}, "/v1/completions")
            assert json.loads(answer.body)["choices"][0]["text"] == " B"
            assert [request.adapter for request in engine.requests] == ["fr"]
            answer = await served.post({**COMPLETION, "model": "xx"}, "/v1/completions")
            assert answer.status == 404

    asyncio.run(run())


class NotingEngine:
    """A real engine that notes the adapters of its requests and runs them without."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # From Python 3.12 on, isinstance() of a protocol looks past __getattr__.
        self.encode, self.decode, self.tokenizer = engine.encode, engine.decode, engine.tokenizer
        self.info, self.max_model_len = engine.info, engine.max_model_len
        self.adapters = {"fr": Path("/fr"), "org/de": Path("/de")}
        self.noted: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate_batches(
        self, request: GenerationRequest
    ) -> AsyncGenerator[Sequence[TokenEvent], None]:
        self.noted.append(request.adapter)
        return self._engine.generate_batches(replace(request, adapter=""))

    async def subscribe(
        self, request: GenerationRequest, notify: Callable[[], None]
    ) -> EventStream:
        self.noted.append(request.adapter)
        return await self._engine.subscribe(replace(request, adapter=""), notify)


def ask_tgi(path: str, body: dict[str, Any], *, has_lora: bool = True) -> list[str]:
    """The adapters that a request to TGI's routes ran with."""

    async def run() -> list[str]:
        async with make_engine(eos_ids=()) as engine:
            noting, metrics = NotingEngine(engine), Metrics()
            options = {"tgi": TgiOptions(model_id="org/base"), "chat_template": TEMPLATE}
            async with serving_backend(
                noting, metrics, api="tgi", has_lora=has_lora, **options
            ) as served:
                assert (await served.post(body, path)).status == 200
            return noting.noted

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "body", "adapter", "is_warned"),
    [
        ("/generate", {"parameters": {"adapter_id": "fr"}}, "fr", False),
        ("/generate_stream", {"parameters": {"adapter_id": "org/de"}}, "org/de", False),
        ("/", {"parameters": {"adapter_id": "fr"}, "stream": True}, "fr", False),
        ("/invocations", {"parameters": {"adapter_id": "fr"}}, "fr", False),
        ("/generate", {"parameters": {"adapter_id": "xx"}}, "", True),
        ("/generate", {"parameters": {"adapter_id": None}}, "", False),
        ("/generate", {}, "", False),
        ("/v1/chat/completions", {**CHAT, "model": "fr"}, "fr", False),
        ("/v1/chat/completions", {**CHAT, "model": "tgi"}, "", False),
        ("/v1/chat/completions", {**CHAT, "model": "org/base"}, "", False),
        ("/v1/chat/completions", {**CHAT, "model": "xx"}, "", True),
        ("/v1/chat/completions", CHAT, "", False),
        ("/v1/completions", {"prompt": "x", "model": "fr"}, "fr", False),
    ],
)
def test_tgi(
    path: str,
    body: dict[str, Any],
    adapter: str,
    is_warned: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    parameters = {"parameters": {"max_new_tokens": 2, **body.get("parameters", {})}}
    is_v1 = path.startswith("/v1/")
    assert ask_tgi(path, body if is_v1 else {"inputs": "x", **body, **parameters}) == [adapter]
    assert ("there is no adapter 'xx'" in caplog.text) == is_warned


def test_tgi_without_lora(caplog: pytest.LogCaptureFixture) -> None:
    """Any adapter is the base model; what may be a plain model's name isn't worth a warning."""
    body = {"prompt": "x", "model": "fr", "max_tokens": 1}
    assert ask_tgi("/v1/completions", body, has_lora=False) == [""]
    assert "no adapter" not in caplog.text
    parameters = {"adapter_id": "fr", "max_new_tokens": 1}
    body = {"inputs": "x", "parameters": parameters}
    assert ask_tgi("/generate", body, has_lora=False) == [""]
    assert "there is no adapter 'fr'; the base model answers" in caplog.text
