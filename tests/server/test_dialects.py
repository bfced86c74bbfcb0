"""Which dialect answers which path, API keys, and CORS."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from lmi_core.errors import UserError
from lmi_server.dialects.base import Reply
from lmi_server.dialects.routes import ServerRoute
from lmi_server.dialects.table import Dialect, DialectTable, ErrorForm
from lmi_server.http.route_page import PAGE, route_page
from tests.server.configured import configured, server_of
from tests.server.harness import serving

BODY = {"inputs": "He is", "parameters": {"max_new_tokens": 2}}


def dialect(name: str, *paths: str) -> Dialect:
    async def answer(request: Any, models: Any) -> Any:
        raise AssertionError

    return Dialect(
        name=name,
        routes=tuple(ServerRoute("GET", path, answer, name) for path in paths),
        error=lambda error, options: Reply(status=500, body=name.encode()),
        errors=ErrorForm(schema={}, statuses={}),
    )


ALL = (
    dialect("lmi", "/invocations", "/ping"),
    dialect("tgi", "/", "/invocations", "/ping", "/v1/chat/completions", "/generate", "/info"),
    dialect("openai", "/v1/chat/completions", "/v1/models", "/health"),
)


def test_a_doubled_slash_is_an_error_of_the_protocol_that_was_meant() -> None:
    table = DialectTable(ALL, "lmi")
    assert table.of("//v1/chat/completions").name == "openai"
    assert table.of("//nothing").name == "lmi"
    assert table.of("/").name == "tgi"


@pytest.mark.parametrize(
    ("api", "path", "owner"),
    [
        ("lmi", "/invocations", "lmi"),
        ("lmi", "/v1/chat/completions", "openai"),
        ("lmi", "/v1/nothing", "openai"),
        ("lmi", "/generate", "tgi"),
        ("lmi", "/", "tgi"),
        ("lmi", "/nothing", "lmi"),
        ("lmi", "/tgi/invocations", "tgi"),
        ("lmi", "/tgi", "tgi"),
        ("tgi", "/invocations", "tgi"),
        ("tgi", "/v1/models", "tgi"),
        ("tgi", "/health", "tgi"),
        ("tgi", "/openai/v1/models", "openai"),
        ("openai", "/invocations", "lmi"),
        ("openai", "/v1/chat/completions", "openai"),
        ("openai", "/info", "tgi"),
        ("openai", "/nothing", "openai"),
    ],
)
def test_owner(api: str, path: str, owner: str) -> None:
    assert DialectTable(ALL, server_of(f"api={api}").api).of(path).name == owner


def test_routes_of_a_path_come_from_its_owner_alone() -> None:
    table = DialectTable(ALL, "tgi")
    assert {route.purpose for route in table.routes()} == {"tgi"}
    prefixed = {route.path for route in table.prefixed_routes()}
    assert {"/lmi/ping", "/tgi/", "/openai/v1/models"} <= prefixed


def test_the_page_of_routes_is_not_stale() -> None:
    hint = "run: python -m lmi_server.http.route_page > server/ROUTES.md"
    assert PAGE.read_text() == route_page(), hint


def test_unknown_api_names_what_is_allowed() -> None:
    with pytest.raises(UserError, match="api is 'ibm'; allowed are lmi, tgi, openai"):
        DialectTable(ALL, "ibm")


@pytest.mark.parametrize(
    ("api", "path", "is_openai"),
    [
        ("lmi", "/nothing", False),
        ("lmi", "/v1/nothing", True),
        ("lmi", "/openai/nothing", True),
        ("openai", "/nothing", True),
        ("openai", "/lmi/nothing", False),
    ],
)
def test_errors_are_in_the_form_of_the_path_s_dialect(api: str, path: str, is_openai: bool) -> None:
    async def run() -> None:
        async with serving(api=api) as served, served.client.get(path) as response:
            assert response.status == 404
            body = json.loads(await response.read())
            assert ("error" in body) is is_openai
            assert ("Pragma" in response.headers) is not is_openai

    asyncio.run(run())


def test_prefix_reaches_the_dialect() -> None:
    async def run() -> None:
        async with serving(api="openai") as served:
            for path in ("/invocations", "/lmi/invocations"):
                answer = await served.post(BODY, path)
                assert answer.body == b'{"generated_text": " a fox"}'
            async with served.client.get("/openai/v1/models/model") as response:
                assert (await response.json())["id"] == "model"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "header", "status"),
    [
        ("/v1/models", None, 401),
        ("/v1/models", "Bearer wrong", 401),
        ("/v1/models", "Basic k2", 401),
        ("/v1/models", "Bearer k2\xff", 401),
        ("/v1/models", "Bearer k2", 200),
        ("/v1/models", "bearer k1", 200),
        ("/metrics", None, 401),
        ("/invocations", None, 401),
        ("/openai/v1/models", None, 401),
        ("/ping", None, 200),
        ("/health", None, 200),
    ],
)
def test_api_key(path: str, header: str | None, status: int) -> None:
    async def run() -> None:
        async with serving(**configured("option.api_key=k1", "api_keys=k2")) as served:
            headers = {} if header is None else {"Authorization": header}
            async with served.client.get(path, headers=headers) as response:
                assert response.status == status
                if status == 401:
                    assert response.headers["WWW-Authenticate"] == "Bearer"
                    assert "Bearer KEY" in await response.text()

    asyncio.run(run())


@pytest.mark.parametrize("key", ["cors_allowed_origin", "option.cors_allow_origin"])
def test_cors_names_allowed_origins_only(key: str) -> None:
    async def run() -> None:
        headers = {"Origin": "https://a.example"}
        async with serving() as served, served.client.get("/ping", headers=headers) as response:
            assert "Access-Control-Allow-Origin" not in response.headers
        async with serving(**configured(f"{key}=https://a.example")) as served:
            async with served.client.get("/ping", headers=headers) as response:
                assert response.headers["Access-Control-Allow-Origin"] == "https://a.example"
            headers["Origin"] = "https://b.example"
            async with served.client.get("/ping", headers=headers) as response:
                assert "Access-Control-Allow-Origin" not in response.headers
                assert response.headers["Vary"] == "Origin"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("api", "path", "allowed"),
    [
        ("tgi", "/generate", "*"),
        ("tgi", "/v1/chat/completions", "*"),
        ("tgi", "/openai/v1/completions", None),
        ("tgi", "/lmi/models", None),
        ("lmi", "/generate", None),
        ("openai", "/v1/completions", None),
    ],
)
def test_pages_of_any_site_call_where_tgi_is_asked_for(
    api: str, path: str, allowed: str | None
) -> None:
    async def run() -> None:
        headers = {"Origin": "https://a.example"}
        name = "Access-Control-Allow-Origin"
        asked = {**headers, "Access-Control-Request-Method": "POST"}
        async with serving(api=api) as served:
            answer = await served.post({"inputs": "a"}, path, headers=headers)
            assert answer.headers.get(name) == allowed
            answer = await served.ask("OPTIONS", path, headers=asked)
            assert answer.headers.get(name) == allowed
            assert (answer.status == 204) is (allowed == "*")
            answer = await served.ask("GET", "/metrics", headers=headers)
            assert name not in answer.headers
        async with serving(api=api, cors_origins=("https://b.example",)) as served:
            answer = await served.post({"inputs": "a"}, path, headers=headers)
            assert name not in answer.headers

    asyncio.run(run())


def test_preflight_needs_no_key() -> None:
    async def run() -> None:
        asked = {
            "Origin": "https://a.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        }
        async with (
            serving(cors_origins=("*",), api_keys=("k",)) as served,
            served.client.options("/v1/chat/completions", headers=asked) as response,
        ):
            assert response.status == 204
            assert response.headers["Access-Control-Allow-Origin"] == "*"
            assert response.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
            assert "POST" in response.headers["Access-Control-Allow-Methods"]

    asyncio.run(run())
