"""The published OpenAPI document, and random requests made from it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from lmi_core.text.chat import ChatTemplate
from lmi_server.dialects.dialects import DIALECTS
from lmi_server.dialects.table import DialectTable
from lmi_server.http.openapi import document
from tests.engine.fake_runner import FakeRunner
from tests.server.dialects.tgi.test_tgi_http import serving as serving_engine
from tests.server.harness import Served, serving
from tests.server.watchdog import shares_process

APIS = ("lmi", "tgi", "openai")
DOCUMENTS = {api: document(DialectTable(DIALECTS, api)) for api in APIS}
TEMPLATE = ChatTemplate({"default": "{% for m in messages %}{{ m.content }}{% endfor %}"})
NUM_EXAMPLES = 15


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from references(item)


@pytest.mark.parametrize("api", APIS)
def test_document(api: str) -> None:
    whole = DOCUMENTS[api]
    schemas = whole["components"]["schemas"]
    assert {f"#/components/schemas/{name}" for name in schemas} == set(references(whole))
    operations = [operation for path in whole["paths"].values() for operation in path.values()]
    ids = [operation["operationId"] for operation in operations]
    assert len(ids) == len(set(ids)) > 10
    table = DialectTable(DIALECTS, api)
    assert len(operations) == len(list(table.routes()))


def test_schemas_are_those_that_decode_bodies() -> None:
    schemas = DOCUMENTS["lmi"]["components"]["schemas"]
    assert "max_new_tokens" in schemas["lmi.LmiParameters"]["properties"]
    body = schemas["lmi.LmiRequest"]["properties"]["parameters"]
    assert {"$ref": "#/components/schemas/lmi.LmiParameters"} in body["anyOf"]
    assert schemas["tgi.GenerateBody"]["required"] == ["inputs"]
    paths = DOCUMENTS["openai"]["paths"]
    assert paths["/v1/models/{model}"]["get"]["parameters"][0]["name"] == "model"


@pytest.mark.parametrize("api", APIS)
def test_it_is_served(api: str) -> None:
    async def run() -> None:
        async with serving(api=api) as served:
            for path in ("/openapi.json", "/api-doc/openapi.json"):
                async with served.client.get(path) as response:
                    assert response.status == 200
                    assert await response.json() == DOCUMENTS[api]

    asyncio.run(run())


class Background:
    """A server over the real engine with the tests' runner, in a thread of its own, and a client's
    session: one for each request takes longer than the request."""

    def __init__(self, api: str) -> None:
        self._api = api
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.port = 0
        self._session = requests.Session()
        self._session.trust_env = False
        # The server may close one that a wrong request came on; whether before the next one's
        # request is anybody's guess.
        self._session.headers["Connection"] = "close"

    def __enter__(self) -> Background:
        self._thread.start()
        assert self._started.wait(30)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        assert not self._thread.is_alive()
        self._session.close()

    def check(self, case: schemathesis.Case) -> None:
        url = f"http://127.0.0.1:{self.port}"
        case.call_and_validate(url, session=self._session, checks=CHECKS)

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        served: Served
        shares_process.set(True)  # with what makes the requests
        async with serving_engine(FakeRunner(), api=self._api, chat_template=TEMPLATE) as served:
            self.port = served.port
            self._started.set()
            await self._stop.wait()


@pytest.fixture(scope="module")
def lmi_server() -> Iterator[Background]:
    with Background("lmi") as server:
        yield server


@pytest.fixture(scope="module")
def tgi_server() -> Iterator[Background]:
    with Background("tgi") as server:
        yield server


EXAMPLES = settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
SLOW = pytest.mark.timeout(600)  # an operation takes seconds, on a busy machine minutes
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


def operations(api: str, *, is_whole: bool) -> Any:
    """An API's, asked at the bounds of every field as well, or at random alone."""
    schema = schemathesis.openapi.from_dict(DOCUMENTS[api])
    schema.config.phases.coverage.enabled = is_whole
    return schema


# What reads a body that another path reads, too, is asked at random.
ALIASES = "^/(models/[^/]+/invoke|predictions/|generate_stream|v1/responses/input_tokens)"
# Under lmi, TGI's other routes have been asked already.
TGI_ALIASES, TGI_ROUTES = "^/(invocations|tokenize)", "^/(v1/|health|ping)"


@SLOW
@operations("lmi", is_whole=True).exclude(path_regex=ALIASES).parametrize()
@EXAMPLES
def test_random_requests(case: schemathesis.Case, lmi_server: Background) -> None:
    lmi_server.check(case)


@SLOW
@operations("lmi", is_whole=False).include(path_regex=ALIASES).parametrize()
@EXAMPLES
def test_random_requests_to_aliases(case: schemathesis.Case, lmi_server: Background) -> None:
    lmi_server.check(case)


@SLOW
@operations("tgi", is_whole=True).include(path_regex=TGI_ROUTES).parametrize()
@EXAMPLES
def test_random_requests_to_tgi(case: schemathesis.Case, tgi_server: Background) -> None:
    tgi_server.check(case)


@SLOW
@operations("tgi", is_whole=False).include(path_regex=TGI_ALIASES).parametrize()
@EXAMPLES
def test_random_requests_to_aliases_of_tgi(case: schemathesis.Case, tgi_server: Background) -> None:
    tgi_server.check(case)
