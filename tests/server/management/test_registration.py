"""Models that a running server agrees to load, and what it says of others."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from lmi_core.config.targets.server_config import ServerConfig
from lmi_core.errors import ConfigError, ModelError, UserError
from lmi_core.settings.placement import MAX_WORKERS
from lmi_server.dialects.base import HttpError
from lmi_server.http.metrics import Metrics
from lmi_server.http.options import ServerOptions
from lmi_server.models.model import Recipe
from lmi_server.models.model_registry import ModelRegistry
from lmi_server.models.registration import ConfiguredRegistrar
from tests.checkpoints import cached_checkpoint
from tests.server.configured import server_of
from tests.server.harness import serving_models


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A model store with a model, and a link that leads out of it."""
    store = tmp_path / "store"
    store.mkdir()
    checkpoint = cached_checkpoint("llama2")
    model = store / "good"
    model.mkdir()
    (model / "serving.properties").write_text(f"option.model_id={checkpoint}\njob_queue_size=9\n")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "serving.properties").write_text(f"option.model_id={checkpoint}\n")
    (store / "link").symlink_to(outside)
    return store


def ask_for(server: ServerConfig, **arguments: str) -> Recipe:
    return asyncio.run(ConfiguredRegistrar([], {}, server).recipe(arguments))


def test_adapters_lie_in_the_model_or_where_models_may(store: Path) -> None:
    server = ServerConfig(model_store=store, model_url_pattern="/elsewhere/.*", values={})
    registrar = ConfiguredRegistrar([], {}, server)
    beside, outside = store / "good" / "adapters" / "fr", store.parent / "outside"
    beside.mkdir(parents=True)
    for src in (str(beside), f"file://{beside}", f"{store}/good/../good/adapters/fr"):
        assert registrar.adapter_path(src, "org/model").resolve() == beside
    model_url = f"file://{outside}/"
    assert registrar.adapter_path(str(outside), model_url) == outside
    for src, status in (
        (str(outside), 403),
        (f"{store}/link", 403),
        ("/elsewhere/x", 424),
        (f"{store}/absent", 424),
        ("s3://bucket/fr", 400),
    ):
        with pytest.raises(HttpError) as caught:
            registrar.adapter_path(src, f"file://{store}/good/")
        assert caught.value.status == status, src
        if status == 403:
            assert "(an adapter must lie in its model's directory, under the model" in str(
                caught.value
            )
    (beside / "model.py").write_text("")
    with pytest.raises(ModelError, match="an adapter's own formatters are not available"):
        registrar.adapter_path(str(beside), model_url)


def test_secure_mode_holds_for_adapters_too(store: Path) -> None:
    environ = {
        "SAGEMAKER_SECURE_MODE": "true",
        "SAGEMAKER_SECURITY_CONTROLS": "DISALLOW_PICKLE_FILES",
    }
    adapter = store / "fr"
    adapter.mkdir()
    registrar = ConfiguredRegistrar([], environ, ServerConfig(model_store=store, values={}))
    assert registrar.adapter_path(str(adapter), "org/model") == adapter
    (adapter / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"adapter_model.bin is forbidden by DISALLOW_PICKLE_FILES"):
        registrar.adapter_path(str(adapter), "org/model")


def test_only_urls_of_the_store_or_the_pattern_are_loaded(store: Path) -> None:
    server = ServerConfig(model_store=store, values={})
    for url in (f"{store}/good", f"file://{store}/good", f"{store}/good/../good"):
        found = ask_for(server, url=url, model_name="m")
        assert (found.name, found.queue_size, found.version) == ("m", 9, None)
        assert found.url == f"file://{store}/good/"
    outside = store.parent / "outside"
    for url in (
        str(outside),
        f"{store}/link",
        f"{store}/../outside",
        "s3://b/m",
        "/",
        "x\0y",
        "file://[",
    ):
        with pytest.raises(HttpError, match="Permission denied") as raised:
            ask_for(server, url=url)
        assert raised.value.status == 403
    with pytest.raises(HttpError, match="no model_store is configured"):
        ask_for(ServerConfig(values={}), url=f"{store}/good")
    pattern = server_of(rf"model_url_pattern={outside}|s3://mine/.*")
    assert ask_for(pattern, url=str(outside)).name == "outside"
    assert ask_for(pattern, url="s3://mine/llama").name == "llama"
    with pytest.raises(HttpError, match="Permission denied"):
        ask_for(pattern, url="s3://yours/llama")


def test_parameters_of_a_registration(store: Path) -> None:
    server = ServerConfig(model_store=store, values={})
    good = {"url": f"{store}/good"}
    found = ask_for(server, **good, model_version="3", job_queue_size="5", max_idle_time="7")
    assert (found.label, found.queue_size, found.max_idle_s) == ("good:3", 5, 7)
    for arguments, words in (
        ({"model_name": "a/b"}, "model_name"),
        ({"model_version": "a b"}, "model_version"),
        ({"engine": "Fortran"}, "engine 'Fortran'"),
        ({"device": "tpu"}, "device 'tpu'"),
        ({"batch_sise": "1"}, "'batch_sise' is unknown"),
    ):
        with pytest.raises(HttpError, match=words) as raised:
            ask_for(server, **good, **arguments)
        assert raised.value.status == 400


def test_custom_code_must_be_allowed(store: Path) -> None:
    properties = store / "good" / "serving.properties"
    properties.write_text(properties.read_text() + "option.trust_remote_code=true\n")
    with pytest.raises(HttpError, match="--allow-custom-code") as raised:
        ask_for(ServerConfig(model_store=store, values={}), url=f"{store}/good")
    assert raised.value.status == 403
    properties.unlink()
    (store / "good" / "model.py").write_text("def handle(inputs):\n    return None\n")
    with pytest.raises(HttpError, match=r"model.py: handle.*--allow-custom-code"):
        ask_for(ServerConfig(model_store=store, values={}), url=f"{store}/good")
    allowed = server_of("allow_custom_code=true", f"model_store={store}")
    assert ask_for(allowed, url=f"{store}/good").name == "good"


def test_the_most_workers_are_those_that_a_running_model_may_get(store: Path) -> None:
    config = ServerConfig(model_store=store, values={})
    for name in ("min_worker", "max_worker"):
        with pytest.raises(ConfigError, match=f"{MAX_WORKERS + 1}.*0 to {MAX_WORKERS}"):
            ask_for(config, url=f"{store}/good", **{name: str(MAX_WORKERS + 1)})


def faults(values: list[Any]) -> list[tuple[str, Any]]:
    names = ("job_queue_size", "batch_size", "max_batch_delay", "max_idle_time", "min_worker")
    return [(name, value) for name in (*names, "max_worker") for value in values]


@pytest.mark.parametrize("in_query", [True, False])
def test_wrong_values_of_every_parameter(store: Path, in_query: bool) -> None:
    values: list[Any] = ["x", "-2", "1.5", "99999999999999999999", "1e999", "9" * 5000]
    cases: list[tuple[str, Any]] = [
        *faults(values),
        ("synchronous", "maybe"),
        ("engine", "Fortran"),
        ("device", "tpu"),
        ("model_name", "a b"),
        ("model_version", "/"),
        ("url", "\0"),
        ("url", "x" * 5000),
    ]
    if not in_query:
        cases += faults([True, [], [1], {}, {"a": 1}, -2, 1.5, 1 << 70])
        cases += [(name, value) for name in ("url", "model_name") for value in ([], {"a": 1})]

    async def run() -> None:
        config = ServerConfig(model_store=store, values={})
        registrar = ConfiguredRegistrar((), {}, config)
        models = ModelRegistry(ServerOptions(port=0), Metrics(), [], registrar=registrar)
        async with models, serving_models(models) as served:
            for name, value in cases:
                asked = {"url": f"{store}/good", "model_name": "m", name: value}
                sent: dict[str, Any] = {"params": asked} if in_query else {"json": asked}
                answer = await served.ask("POST", "/models", **sent)
                case = (name, value, answer.status, answer.body[:300])
                assert answer.status == (
                    403 if name == "url" and isinstance(value, str) else 400
                ), case
                error = json.loads(answer.body)
                assert error["code"] == answer.status, case
                assert len(error["message"]) < 1000, case
                if isinstance(value, str):
                    # The model's key is named, which is minWorkers for min_worker.
                    message = error["message"].lower().replace("_", "")
                    assert name.replace("_", "") in message or name == "url", case
            assert not list(models)

    asyncio.run(run())
