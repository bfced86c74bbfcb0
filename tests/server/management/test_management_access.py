"""Who may manage: programs of the same machine, and who has the admin's key."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.server.configured import configured
from tests.server.management.managed import managed
from tests.server.models.test_models import LMI, lmi_text


def test_admin_key() -> None:
    async def run() -> None:
        async with managed(**configured("admin_key=boss", "api_keys=user")) as (served, _):
            for key in (None, "user", "bos"):
                headers = {} if key is None else {"Authorization": f"Bearer {key}"}
                answer = await served.ask("GET", "/models", headers=headers)
                assert (answer.status, json.loads(answer.body)["code"]) == (401, 401)
            headers = {"Authorization": "Bearer boss", "Host": "elsewhere", "Origin": "http://x"}
            assert (await served.ask("GET", "/models", headers=headers)).status == 200
            # The admin's key isn't the users'.
            answer = await served.post(LMI, headers={"Authorization": "Bearer user"})
            assert answer.status == 200

    asyncio.run(run())


def test_open_management() -> None:
    """As a platform needs it that forwards its own requests to a container."""

    async def run() -> None:
        headers = {"Host": "container:8080"}
        async with managed(host="0.0.0.0", **configured("open_management=true")) as (
            served,
            registrar,
        ):
            answer = await served.ask("POST", "/models?url=/m/x&model_name=x", headers=headers)
            assert answer.status == 200
            assert len(registrar.asked) == 1
            assert lmi_text(await served.post(LMI, "/models/x/invoke")) == " x"
            assert (await served.ask("DELETE", "/models/x", headers=headers)).status == 200
        keys = configured("open_management=true", "api_keys=user")
        async with managed(host="0.0.0.0", **keys) as (served, _):
            assert (await served.ask("GET", "/models", headers=headers)).status == 401

    asyncio.run(run())


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Host": "evil.example"},
        {"Host": "10.0.0.1"},
        {"Host": "[ x"},
        {"Host": "evil.example@127.0.0.1"},
        {"Host": "evil.example@localhost:8080"},
        {"Host": "127.0.0.1/evil.example"},
        {"Host": "localhost:8080:80"},
        {"Forwarded": "for=10.0.0.1"},
        {"X-Forwarded-For": "127.0.0.1"},
        {"x-forwarded-proto": "https"},
        {"X-Real-IP": "127.0.0.1"},
        {"True-Client-IP": "10.0.0.1"},
        {"Via": "1.1 proxy"},
    ],
)
def test_browsers_and_proxies_manage_nothing(headers: dict[str, str]) -> None:
    async def run() -> None:
        async with managed() as (served, registrar):
            for method, path in (("POST", "/models?url=/m/x&model_name=x"), ("GET", "/models")):
                answer = await served.ask(method, path, headers=headers)
                assert (answer.status, json.loads(answer.body)["type"]) == (
                    403,
                    "ForbiddenException",
                )
            assert not registrar.asked

    asyncio.run(run())


def test_a_server_for_others_has_no_management_without_a_key() -> None:
    async def run() -> None:
        async with managed(host="0.0.0.0") as (served, _):
            for prefix in ("", "/lmi"):
                answer = await served.ask("POST", f"{prefix}/models?url=/m/x&model_name=x")
                assert answer.status == 404
                assert json.loads(answer.body)["type"] == "ResourceNotFoundException"
            assert lmi_text(await served.post(LMI, "/models/first/invoke")) == " first"
        async with managed(host="0.0.0.0", admin_key="boss") as (served, _):
            headers = {"Authorization": "Bearer boss"}
            assert (await served.ask("GET", "/models", headers=headers)).status == 200

    asyncio.run(run())
