"""A model registered by the URL of its archive, from the download to its first answer."""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
from pathlib import Path
from typing import Any

from lmi_core.config.targets.server_config import ServerConfig
from lmi_server.http.metrics import Metrics
from lmi_server.http.options import ServerOptions
from lmi_server.models.model_registry import ModelRegistry
from lmi_server.models.registration import ConfiguredRegistrar
from tests.checkpoints import cached_checkpoint
from tests.config.artefacts.test_unpack import tar_of
from tests.config.artefacts.web import Web, serving_files
from tests.config.cases import NO_CACHE
from tests.server.harness import Served, serving_models


def checkpoint_archive() -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        tar.add(cached_checkpoint("llama2"), "model")
    return packed.getvalue()


def registrar(root: Path, web: Web, **variables: str) -> ConfiguredRegistrar:
    pattern = rf"{web.url}/mine/.*"
    environ = {
        **NO_CACHE,
        "SERVING_MODEL_URL_PATTERN": pattern,
        "SERVING_DOWNLOAD_DIR": str(root / "cache"),
    }
    return ConfiguredRegistrar((), environ, ServerConfig(model_url_pattern=pattern, values={}))


def unpacked(root: Path) -> set[Path]:
    return {path for path in (root / "cache" / "archive").iterdir() if path.is_dir()}


def test_registered_by_its_url(tmp_path: Path) -> None:
    async def run(web: Web) -> None:
        models = ModelRegistry(
            ServerOptions(port=0, drain_timeout_s=5),
            Metrics(),
            [],
            registrar=registrar(tmp_path, web),
        )
        async with models, serving_models(models) as served:
            url = f"{web.url}/mine/tiny.tar.gz"
            answer = await served.ask("POST", f"/models?url={url}")
            assert (answer.status, answer.body) == (
                200,
                b'{\n  "status": "Model \\"tiny\\" registered."\n}\n',
            )
            (described,) = json.loads((await served.ask("GET", "/models/tiny")).body)
            assert described["models"][0]["modelUrl"] == url
            body = {"inputs": "hello", "parameters": {"max_new_tokens": 2}}
            assert (await served.post(body, "/predictions/tiny")).status == 200
            assert web.asked == [("/mine/tiny.tar.gz", 200)]
            kept = unpacked(tmp_path)
            await refusals(served, web)
            assert unpacked(tmp_path) == kept

    with serving_files() as web:
        web.files["/mine/tiny.tar.gz"] = checkpoint_archive()
        web.files["/yours/tiny.tar.gz"] = b""
        web.files["/mine/broken.zip"] = b"no archive"
        code = tar_of(tmp_path / "code.tar", {"model.py": b"def handle(inputs): ...\n"}, "w")
        web.files["/mine/code.tar"] = code.read_bytes()
        asyncio.run(run(web))


async def refusals(served: Served, web: Web) -> None:
    async def refused(path: str) -> tuple[int, Any, str]:
        answer = await served.ask("POST", f"/models?url={web.url}{path}")
        fault = json.loads(answer.body)
        return answer.status, fault["type"], fault["message"]

    status, kind, message = await refused("/yours/tiny.tar.gz")
    assert (status, kind) == (403, "ForbiddenException")
    assert "Permission denied" in message
    status, kind, message = await refused("/mine/broken.zip")
    assert (status, kind) == (400, "ModelException")
    assert "broken.zip can't be unpacked" in message
    status, _, message = await refused("/mine/absent.zip")
    assert (status, message.endswith("HTTP 404")) == (400, True)
    status, kind, message = await refused("/mine/code.tar")
    assert (status, kind) == (403, "ForbiddenException")
    assert "only with --allow-custom-code" in message
    assert [path for path, _ in web.asked if path.startswith("/yours")] == []
    listed = json.loads((await served.ask("GET", "/models")).body)["models"]
    assert [model["modelName"] for model in listed] == ["tiny"]
