"""Management on an address of its own: what is there, what is elsewhere, who may use it."""

from __future__ import annotations

import asyncio
import json
import signal
import urllib.error
import urllib.request

import aiohttp
import pytest

from lmi_core.errors import UserError
from lmi_server.http.lifecycle import bind_all
from lmi_server.http.options import Listening, ServerOptions
from tests.server.configured import configured
from tests.server.harness import Served, serving
from tests.server.management.managed import managed
from tests.server.models.test_models import LMI, lmi_text
from tests.server.test_process import running

HERE = Listening("127.0.0.1", 0)


def client_of(served: Served) -> aiohttp.ClientSession:
    assert served.management_port is not None
    return aiohttp.ClientSession(f"http://127.0.0.1:{served.management_port}")


def test_management_has_its_own_port() -> None:
    async def run() -> None:
        here = configured("management_address=http://127.0.0.1:0")
        async with managed(**here) as (served, _), client_of(served) as manager:
            for prefix in ("", "/lmi"):
                path = f"{prefix}/models"
                answer = await served.ask("GET", path)
                assert answer.status == 404
                assert json.loads(answer.body)["type"] == "ResourceNotFoundException"
                async with manager.get(path) as response:
                    assert response.status == 200
                    assert (await response.json())["models"][0]["modelName"] == "first"
            async with manager.post("/models?url=/m/x&model_name=x") as response:
                assert response.status == 200
            # The new model answers on the other port.
            assert lmi_text(await served.post(LMI, "/predictions/x")) == " x"
            async with manager.delete("/models/x") as response:
                assert response.status == 200
            assert (await served.post(LMI, "/predictions/x")).status == 404
            assert "/models" not in json.loads((await served.ask("GET", "/openapi.json")).body)

    asyncio.run(run())


@pytest.mark.parametrize("api", ["lmi", "tgi", "openai"])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/ping"),
        ("GET", "/metrics"),
        ("GET", "/health"),
        ("GET", "/openapi.json"),
        ("POST", "/invocations"),
        ("POST", "/lmi/invocations"),
        ("POST", "/tgi/generate"),
        ("POST", "/openai/v1/completions"),
    ],
)
def test_nothing_else_is_there(api: str, method: str, path: str) -> None:
    async def run() -> None:
        async with serving(api=api, management=HERE) as served, client_of(served) as manager:
            async with manager.request(method, path, json=LMI) as response:
                assert response.status == 404
            async with manager.get("/lmi/models") as response:
                assert response.status == 200

    asyncio.run(run())


def test_the_same_rules_hold_there() -> None:
    async def run() -> None:
        async with managed(management=HERE) as (served, _), client_of(served) as manager:
            for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
                async with manager.get("/models", headers=headers) as response:
                    assert response.status == 403
        options = {"management": Listening("0.0.0.0", 0), "admin_key": "boss"}
        async with managed(**options) as (served, _), client_of(served) as manager:
            for key, status in (("boss", 200), ("bos", 401)):
                headers = {"Authorization": f"Bearer {key}", "Host": "elsewhere"}
                async with manager.get("/models", headers=headers) as response:
                    assert response.status == status

    asyncio.run(run())


def test_without_a_key_nothing_listens_for_others() -> None:
    async def run() -> None:
        async with managed(management=Listening("0.0.0.0", 0)) as (served, _):
            assert served.management_port is None
            assert (await served.ask("GET", "/models")).status == 404
            assert lmi_text(await served.post(LMI)) == " first"

    asyncio.run(run())


def test_a_busy_port_is_named() -> None:
    with bind_all(ServerOptions(port=0)) as (taken,):
        taken.listen()
        port = taken.getsockname()[1]
        options = ServerOptions(port=0, management=Listening("127.0.0.1", port))
        with (
            pytest.raises(UserError, match=f"Port {port} .* another management_address"),
            bind_all(options),
        ):
            pass


def test_a_running_server_says_where_management_is() -> None:
    with running(server={"management": ["127.0.0.1", 0]}) as process:
        (url,) = [
            line.removeprefix("Management on ")
            for line in process.banner
            if line.startswith("Management on ")
        ]
        with urllib.request.urlopen(f"{url}/models", timeout=60) as response:
            assert json.load(response)["models"]
        with pytest.raises(urllib.error.HTTPError) as raised:
            urllib.request.urlopen(f"http://127.0.0.1:{process.port}/models", timeout=60)
        raised.value.close()
        assert raised.value.code == 404
        process.popen.send_signal(signal.SIGTERM)
        assert process.finish()[0] == 0
