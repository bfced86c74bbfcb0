"""Several models behind one port: who answers, what health and metrics say."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from lmi_core.engine.stats import EngineObserver
from lmi_server.http.metrics import Metrics
from lmi_server.http.options import ServerOptions
from lmi_server.models.model import ModelState, Opened, Recipe, recipe_of_engine
from lmi_server.models.model_registry import ModelRegistry
from tests.server.configured import configured
from tests.server.fake_engine import FakeEngine
from tests.server.harness import Answer, Served, serving_models

ENGINES = {"a": " A", "b": " B", "c:1": " C1", "c:2": " C2"}


def engine_named(text: str) -> FakeEngine:
    return FakeEngine(text=text)


def recipe(name: str, engine: FakeEngine, **options: Any) -> Recipe:
    name, _, version = name.partition(":")
    chosen = ServerOptions(model_name=name, model_version=version or None, **options)
    return recipe_of_engine(engine, chosen, f"file:///store/{name}/")


def registry(names: Mapping[str, str] = ENGINES, **options: Any) -> ModelRegistry:
    options = {"port": 0, "drain_timeout_s": 0.2, **options}
    recipes = [recipe(name, engine_named(text), **options) for name, text in names.items()]
    return ModelRegistry(ServerOptions(**options), Metrics(), recipes)


def lmi_text(answer: Answer) -> str:
    text: str = json.loads(answer.body)["generated_text"]
    return text


LMI = {"inputs": "hello", "parameters": {"max_new_tokens": 1}}
COMPLETION = {"prompt": "hello", "max_tokens": 1}


@pytest.mark.parametrize(
    ("path", "headers", "text"),
    [
        ("/predictions/b", {}, " B"),
        ("/predictions/c/2", {}, " C2"),
        ("/models/b/invoke", {}, " B"),
        ("/invocations?model_name=b", {}, " B"),
        ("/invocations?model_name=c&model_version=1", {}, " C1"),
        ("/invocations", {"model_name": "b"}, " B"),
        ("/invocations", {"X-Amzn-SageMaker-Custom-Attributes": "x=1; model_name = b"}, " B"),
        (
            "/invocations",
            {"X-Amzn-SageMaker-Custom-Attributes": "model_name=c;model_version=2"},
            " C2",
        ),
        ("/invocations", {"X-Amzn-SageMaker-Target-Model": "b"}, " B"),
        ("/invocations", {"X-Amzn-SageMaker-Target-Model": "folder/b.tar.gz"}, " B"),
        ("/predictions/a", {"model_name": "b"}, " A"),
        ("/lmi/invocations?model_name=b", {}, " B"),
    ],
)
def test_lmi_requests_name_their_model(path: str, headers: dict[str, str], text: str) -> None:
    async def run() -> None:
        async with serving_models(registry()) as served:
            answer = await served.post(LMI, path, headers=headers)
            assert (answer.status, lmi_text(answer)) == (200, text)

    asyncio.run(run())


@pytest.mark.parametrize("multipart", [False, True])
def test_a_form_names_its_model(multipart: bool) -> None:
    """Engines take no forms; the error is that of the model, or of the choice."""

    async def run() -> None:
        async with serving_models(registry()) as served:
            for fields, status, words in (
                ({"model_name": "b", "inputs": "x"}, 424, "Content-Type"),
                ({"model_name": "x"}, 404, "Model or workflow not found: x"),
                ({"inputs": "x"}, 400, "Parameter model_name is required."),
            ):
                form = aiohttp.FormData(fields, default_to_multipart=multipart)
                answer = await served.ask("POST", "/invocations", data=form)
                assert (answer.status, words in answer.body.decode()) == (status, True), fields

    asyncio.run(run())


def test_versions_of_a_name_take_turns() -> None:
    async def run() -> None:
        async with serving_models(registry()) as served:
            texts = [lmi_text(await served.post(LMI, "/predictions/c")) for _ in range(4)]
            assert texts in ([" C1", " C2"] * 2, [" C2", " C1"] * 2)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "status", "kind", "message"),
    [
        ("/invocations", 400, "BadRequestException", "Parameter model_name is required."),
        ("/predictions/x", 404, "ModelNotFoundException", "Model or workflow not found: x"),
        ("/models/x/invoke", 404, "ModelNotFoundException", "Model or workflow not found: x"),
        ("/predictions/c/3", 404, "ModelNotFoundException", "Model or workflow not found: c:3"),
        ("/predictions/a/1", 404, "ModelNotFoundException", "Model or workflow not found: a:1"),
    ],
)
def test_lmi_errors_of_the_choice(path: str, status: int, kind: str, message: str) -> None:
    async def run() -> None:
        async with serving_models(registry()) as served:
            answer = await served.post(LMI, path)
            assert answer.status == status
            expected = {"code": status, "type": kind, "message": message}
            assert answer.body == (json.dumps(expected, indent=2) + "\n").encode()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "model is missing; "),
        ({"model": "x"}, "The model 'x' does not exist; "),
    ],
)
def test_tgi_errors_of_the_choice(fields: dict[str, str], message: str) -> None:
    async def run() -> None:
        async with serving_models(registry()) as served:
            answer = await served.post({"inputs": "a", **fields}, "/generate")
            assert answer.status == 422
            body = json.loads(answer.body)
            assert body["error_type"] == "validation"
            assert message in body["error"]
            assert "'a', 'b', 'c' are served here" in body["error"]

    asyncio.run(run())


def test_openai_bodies_name_their_model() -> None:
    async def run() -> None:
        async with serving_models(registry()) as served:
            for name, text in (("a", " A"), ("b", " B")):
                body = {**COMPLETION, "model": name}
                answer = json.loads((await served.post(body, "/v1/completions")).body)
                assert (answer["model"], answer["choices"][0]["text"]) == (name, text)
                chosen = await served.post(COMPLETION, f"/v1/completions?model_name={name}")
                assert json.loads(chosen.body)["model"] == name
            tokens = await served.post({"prompt": "x y", "model": "b"}, "/tokenize")
            assert json.loads(tokens.body)["count"] == 2

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "status", "param", "words"),
    [
        (COMPLETION, 400, "model", "model is missing; 'a', 'b', 'c' are served here"),
        ({**COMPLETION, "model": "x"}, 404, "model", "'x' does not exist; 'a', 'b', 'c' are"),
        ({**COMPLETION, "model": "tgi"}, 404, "model", "'tgi' does not exist; 'a', 'b', 'c' are"),
        ({**COMPLETION, "model": 5}, 400, "model", "model"),
        (b'{"prompt', 400, None, "JSON"),
        (b"", 400, None, "JSON"),
    ],
)
def test_openai_errors_of_the_choice(body: Any, status: int, param: str | None, words: str) -> None:
    async def run() -> None:
        async with serving_models(registry()) as served:
            headers = {"Content-Type": "application/json"}
            answer = await served.post(body, "/v1/completions", headers=headers)
            error = json.loads(answer.body)["error"]
            assert (answer.status, error["param"]) == (status, param)
            assert words in error["message"]

    asyncio.run(run())


def test_models_are_listed_once_per_name() -> None:
    async def run() -> None:
        async with serving_models(registry()) as served:
            listed = json.loads((await served.ask("GET", "/v1/models")).body)
            assert [model["id"] for model in listed["data"]] == ["a", "b", "c"]
            one = json.loads((await served.ask("GET", "/v1/models/b")).body)
            assert (one["id"], one["max_model_len"]) == ("b", 4096)
            assert (await served.ask("GET", "/v1/models/x")).status == 404

    asyncio.run(run())


def test_metrics_are_labelled_and_stay_valid() -> None:
    async def run() -> None:
        models = registry({"a": " A", "b": " B"})
        async with serving_models(models) as served:
            await served.post(LMI, "/predictions/b")
            text = (await served.ask("GET", "/metrics")).body.decode()
            assert len(text.splitlines()) == len(set(text.splitlines()))
            families = {family.name: family for family in text_string_to_metric_families(text)}
            tokens = {s.labels["model_name"]: s.value for s in families["lmi_steps"].samples}
            assert set(tokens) == {"a", "b"}
            generated = families["lmi_generated_tokens"].samples
            assert {s.labels["model_name"]: s.value for s in generated} == {"a": 0, "b": 1}
            model = models.find("b")
            assert model is not None
            await models.remove(model)
            assert '"b"' not in (await served.ask("GET", "/metrics")).body.decode()

    asyncio.run(run())


def test_ping_names_every_model_and_fails_with_one() -> None:
    async def run() -> None:
        models = registry({"a": " A", "b": " B"})
        async with serving_models(models) as served:
            answer = await served.ask("GET", "/ping")
            both = {"a": {"status": "Healthy"}, "b": {"status": "Healthy"}}
            assert (answer.status, json.loads(answer.body)) == (200, both)
            assert (await served.ask("GET", "/health")).status == 200
            model = models.find("b")
            assert model is not None
            broken: Any = model.answering().backend
            broken.healthy = False
            answer = await served.ask("GET", "/ping")
            assert (answer.status, json.loads(answer.body)["b"]) == (500, {"status": "FAILED"})
            assert (await served.ask("GET", "/health")).status == 503
            assert lmi_text(await served.post(LMI, "/predictions/a")) == " A"
            refused = json.loads((await served.post(LMI, "/predictions/b")).body)
            assert refused["message"] == "Model is not ready: b"
            broken.healthy = True

    asyncio.run(run())


@pytest.mark.parametrize(("multi_status", "status"), [(False, 200), (True, 207)])
def test_ping_while_loading(multi_status: bool, status: int) -> None:
    async def run() -> None:
        go_on = asyncio.Event()
        options = ServerOptions(port=0, **configured(f"allow_multi_status={multi_status}"))

        async def open_slowly(_: EngineObserver) -> Opened:
            await go_on.wait()
            return Opened(options, engine_named(" M"))

        models = ModelRegistry(options, Metrics(), [Recipe(name="model", open=open_slowly)])
        async with serving_models(models, load=False) as served:
            loading = asyncio.ensure_future(models.load_all())
            answer = await served.ask("GET", "/ping")
            pending = b'{\n  "model": {\n    "status": "PENDING"\n  }\n}\n'
            assert (answer.status, answer.body) == (status, pending)
            assert (await served.ask("GET", "/health")).status == 503
            refused = await served.post(LMI)
            assert (refused.status, json.loads(refused.body)["type"]) == (503, "WlmException")
            go_on.set()
            await loading
            answer = await served.ask("GET", "/ping")
            assert (answer.status, b"Healthy" in answer.body) == (200, True)
            assert lmi_text(await served.post(LMI)) == " M"

    asyncio.run(run())


async def _failing_open(_: EngineObserver) -> Opened:
    raise OSError("no such disk")


def test_a_model_that_fails_to_load_ends_the_start() -> None:
    async def run() -> None:
        good = engine_named(" A")
        recipes = [recipe("a", good), Recipe(name="b", open=_failing_open)]
        models = ModelRegistry(ServerOptions(port=0), Metrics(), recipes)
        with pytest.raises(OSError, match="no such disk"):
            async with models:
                await models.load_all()
        assert {model.state for model in models} == {ModelState.STOPPED}

    asyncio.run(run())


def test_the_one_model_of_the_start_is_the_default() -> None:
    """One model of the start answers what names none, also once others have come."""

    async def run() -> None:
        models = registry({"a": " A"})
        async with serving_models(models) as served:
            late = models.add(recipe("late", engine_named(" L")))
            await models.load(late, keep_failed=False)
            await _default_answers(served, " A")
            assert lmi_text(await served.post(LMI, "/predictions/late")) == " L"
            await models.remove(late)
            await _default_answers(served, " A")

    asyncio.run(run())


async def _default_answers(served: Served, text: str) -> None:
    assert lmi_text(await served.post(LMI)) == text
    completion = json.loads((await served.post(COMPLETION, "/v1/completions")).body)
    assert completion["choices"][0]["text"] == text


@pytest.mark.parametrize(
    ("headers", "status", "words"),
    [
        ({"x-synchronous": "false"}, 400, "x-synchronous"),
        ({"X-Amzn-SageMaker-Custom-Attributes": "x-starting-token=1"}, 400, "x-starting-token"),
        ({"handler": "x"}, 400, "The handler can't be overridden in a request"),
    ],
)
def test_properties_that_ask_for_what_is_not_there(
    headers: dict[str, str], status: int, words: str
) -> None:
    async def run() -> None:
        async with serving_models(registry({"a": " A"})) as served:
            answer = await served.post(LMI, headers=headers)
            assert answer.status == status
            assert words in answer.body.decode()

    asyncio.run(run())


def test_sagemakers_inference_id_is_the_request_id() -> None:
    async def run() -> None:
        async with serving_models(registry({"a": " A"})) as served:
            answer = await served.post(LMI, headers={"X-Amzn-SageMaker-Inference-Id": "id-7"})
            assert answer.headers["x-request-id"] == "id-7"

    asyncio.run(run())
