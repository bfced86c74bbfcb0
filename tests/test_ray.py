"""The application of Ray Serve: the server of a replica, and all of it where Ray is installed."""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.request

import pytest

from lmi_core.demo import MODEL_DIR
from lmi_core.errors import EngineError, MissingExtraError, UserError
from lmi_core.ray import LocalServer, app, autoscaling, serve_arguments

pytestmark = [pytest.mark.timeout(200), pytest.mark.filterwarnings("ignore")]

BODY = {"inputs": "Once", "parameters": {"max_new_tokens": 5, "ignore_eos_token": True}}
STREAM = json.dumps({**BODY, "stream": True}).encode()


def test_what_is_serves_and_what_is_ours() -> None:
    given = {"model": "/m", "num_cpus": "4", "max_replicas": 3, "max_model_len": "512", "a.b": 1}
    assert serve_arguments(given) == [
        *("/m", "--option", "max_model_len=512"),
        *("--option", "a.b=1"),
    ]
    assert serve_arguments({}) == []


def test_numbers_that_serve_cannot_use_are_named() -> None:
    scaling = autoscaling({"min_replicas": "2", "target_ongoing_requests": "1.5"})
    assert scaling == {"min_replicas": 2, "max_replicas": 2, "target_ongoing_requests": 1.5}
    for given, message in (
        ({"min_replicas": "1.5"}, "min_replicas='1.5' is not a whole number"),
        ({"target_ongoing_requests": "many"}, "target_ongoing_requests='many' is not a number"),
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas=2 is below min_replicas=3"),
    ):
        with pytest.raises(UserError, match=message):
            autoscaling(given)


def test_a_replicas_server_answers_as_it_comes() -> None:
    server = LocalServer([str(MODEL_DIR)])

    async def main() -> None:
        headers = [(b"Content-Type", b"application/json"), (b"Connection", b"keep-alive")]
        answer = await server.ask("POST", b"/invocations", headers, STREAM)
        body = b"".join([piece async for piece in answer.pieces])
        assert (answer.status, len(body.splitlines())) == (200, 5)
        names = {name for name, _ in answer.headers}
        assert b"content-type" in names
        assert not names & {b"connection", b"transfer-encoding", b"content-length"}
        missing = await server.ask("GET", b"/nothing?x=1", [], b"")
        assert missing.status == 404
        assert b"/nothing" in b"".join([piece async for piece in missing.pieces])
        # Who goes away early leaves nothing running.
        long = json.dumps({**BODY, "parameters": {"max_new_tokens": 400}, "stream": True})
        answer = await server.ask("POST", b"/invocations", headers, long.encode())
        assert await anext(answer.pieces)
        await answer.pieces.aclose()  # type: ignore[attr-defined]

    try:
        asyncio.run(main())
        server.check()
    finally:
        assert server.stop() == 0
    with pytest.raises(EngineError, match="ended with status 0"):
        server.check()


def test_a_server_that_cannot_start_says_so() -> None:
    with pytest.raises(EngineError, match="status 2"):
        LocalServer(["/no/such/model"])


def test_serve_is_asked_for_by_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"lmi-core\[ray-serve\]"):
        app({})


def test_an_application_on_a_cluster() -> None:
    ray = pytest.importorskip("ray")
    serve = pytest.importorskip("ray.serve")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": 8643})
        serve.run(app({"model": str(MODEL_DIR), "max_model_len": "512"}), route_prefix="/lmi")
        request = urllib.request.Request(
            "http://127.0.0.1:8643/lmi/invocations",
            STREAM,
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            assert response.status == 200
            assert len(response.read().splitlines()) == 5
    finally:
        serve.shutdown()
        ray.shutdown()
