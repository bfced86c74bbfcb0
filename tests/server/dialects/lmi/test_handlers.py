"""Models that answer by code of their own, over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

from lmi_core.config.targets.server_config import ServerConfig
from lmi_core.settings.custom_code_config import CustomCodeConfig
from lmi_server.http.metrics import Metrics
from lmi_server.http.options import ServerOptions
from lmi_server.models.custom_code_backend import CustomCodeBackend
from lmi_server.models.model_registry import ModelRegistry
from lmi_server.models.registration import ConfiguredRegistrar
from tests.custom_code.harness import WAYS_TO_FAIL, write
from tests.server.harness import (
    Served,
    eventually,
    http_request,
    serving_backend,
    serving_models,
)
from tests.server.test_sizes import exchanged

HANDLER = (
    """
import os, time
from djl_python import Input, Output

def handle(inputs: Input):
    if inputs.is_empty():
        return None
    what = inputs.get_as_json().get("do") if inputs.get_property("content-type") else None
    return globals().get(what, items)(inputs)

def items(inputs):
    pairs = [[key, value.decode("latin-1")] for key, value in inputs.get_content()]
    return Output().add_as_json({"items": pairs, "own": inputs.get_property("X-OWN")})

def answer(inputs):
    return (Output(207, "Mixed\\nsigns é").add("text é").add_property("X-Own", "a\\r\\nb")
            .add_property("Content-Length", 3).add_property("bad name", 1))

def typed(inputs):
    return Output().add(b"<a/>").add_property("content-type", "text/xml")

def nothing(inputs):
    return None

def huge(inputs):
    return Output().add(b"x" * 3_000_000)

def stream(inputs):
    return Output().add_stream_content(iter([["a"], ["b"]]))

def broken_at_once(inputs):
    def items():
        raise ValueError("first")
        yield
    return Output().add_stream_content(items())

def broken_later(inputs):
    def items():
        yield ["a"]
        raise ValueError("later")
    return Output().add_stream_content(items())

def endless(inputs):
    def items():
        while True:
            time.sleep(0.001)
            yield ["x" * 1000]
    return Output().add_stream_content(items())
"""
    + WAYS_TO_FAIL
)


@asynccontextmanager
async def handling(
    directory: Path, text: str = HANDLER, **fields: Any
) -> AsyncIterator[tuple[Served, CustomCodeBackend]]:
    config: CustomCodeConfig = replace(write(directory, text), **fields)
    backend = CustomCodeBackend(config)
    async with backend, serving_backend(backend, Metrics()) as served:
        yield served, backend
        await eventually(lambda: backend.pool.num_running == 0, 20)
        assert len(backend.pool.queue) == 0
    assert not [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]


def test_what_a_handler_is_given(tmp_path: Path) -> None:
    async def run() -> None:
        async with handling(tmp_path) as (served, _):
            url = "/predictions/model?a=1&a=2"
            async with served.client.post(
                url, data=b"\x00\xff", skip_auto_headers=["Content-Type"], headers={"x-OWN": "h"}
            ) as response:
                assert json.loads(await response.read()) == {
                    "items": [["a", "1"], ["a", "2"], ["data", "\x00\xff"]],
                    "own": "h",
                }
            attributes = {"X-Amzn-SageMaker-Custom-Attributes": "x-own= c ;skipped"}
            answer = await served.post(b"", headers=attributes, skip_auto_headers=["Content-Type"])
            assert json.loads(answer.body) == {"items": [["data", ""]], "own": "c"}
            async with served.client.get("/invocations") as response:
                assert (await response.json())["items"] == [["data", ""]]
            answer = await served.post({}, headers={"handler": "other"})
            assert answer.status == 400

    asyncio.run(run())


FORM_HANDLER = """
from djl_python import Output

def handle(inputs):
    if inputs.is_empty():
        return None
    return Output().add_as_json([[key, value.decode("latin-1")] for key, value in
                                 inputs.get_content()])
"""


def test_forms(tmp_path: Path) -> None:
    async def run() -> None:
        async with handling(tmp_path, FORM_HANDLER) as (served, _):
            async with served.client.post("/invocations", data={"a": "1 é", "b": ""}) as response:
                assert await response.json() == [["a", "1 Ã©"], ["b", ""]]
            with aiohttp.MultipartWriter("form-data") as form:
                for name, value in (("x", b"\r\n--\x00\xff\r\n"), ("y", b"")):
                    part = form.append(value, {"Content-Type": "image/png"})
                    part.set_content_disposition("form-data", name=name, filename="f.png")
            async with served.client.post("/invocations?q=1", data=form) as response:
                assert await response.json() == [
                    ["q", "1"],
                    ["x", "\r\n--\x00\xff\r\n"],
                    ["y", ""],
                ]
            for content_type, body, words in (
                ("multipart/form-data", b"", "names no boundary"),
                ("multipart/form-data; boundary=x", b"--x\r\n\r\nv", "last boundary"),
                ("multipart/form-data; boundary=x", b"--x\r\n\r\nv\r\n--x--", "has no name"),
                ("application/x-www-form-urlencoded", b"a&" * 2000, "more than 1000"),
            ):
                headers = {"Content-Type": content_type}
                answer = await served.post(body, headers=headers)
                assert answer.status == 400
                assert words in json.loads(answer.body)["message"]

    asyncio.run(run())


ECHO = """
from djl_python import Output

def handle(inputs):
    return None if inputs.is_empty() else Output().add(inputs.get_as_bytes())
"""


def test_long_bodies_and_answers_hold_nobody(tmp_path: Path) -> None:
    """The harness watches the loop."""
    body = b"x" * (48 << 20)

    async def run() -> None:
        async with handling(tmp_path, ECHO, max_output_bytes=64 << 20) as (served, _):
            answer = await asyncio.to_thread(
                exchanged, served.port, "/invocations", body, "application/octet-stream"
            )
            head, _, text = answer.partition(b"\r\n\r\n")
            assert b" 200 OK" in head
            assert f"Content-Length: {len(body)}".encode() in head
            assert text == body

    asyncio.run(run())


def test_answers(tmp_path: Path) -> None:
    async def run() -> None:
        async with handling(tmp_path) as (served, _):
            async with served.client.post("/invocations", json={"do": "answer"}) as response:
                assert (response.status, response.reason) == (207, "Mixed signs \xe9")
                assert await response.text() == "text é"
                assert response.headers["x-own"] == "a b"
                assert response.headers["Content-Type"] == "text/plain; charset=utf-8"
                assert response.headers["Content-Length"] == "7"
                assert response.headers["Pragma"] == "no-cache"
            answer = await served.post({"do": "typed"})
            assert (answer.body, answer.headers["Content-Type"]) == (b"<a/>", "text/xml")
            answer = await served.post({"do": "nothing"})
            assert (answer.status, answer.body) == (204, b"")
            raw = await served.raw(http_request(b'{"do": "fail"}', "Content-Type: a/json"))
            assert raw.startswith(b"HTTP/1.1 424 prediction failure\r\n")
            assert b"\r\nConnection: close\r\n" in raw
            body = '{\n  "code":424,\n  "message":"prediction failure",\n  "error":"it is é"\n}'
            assert raw.endswith(b"\r\n\r\n" + body.encode())
            answer = await served.post({"do": "huge"})
            assert len(answer.body) == 3_000_000
            answer = await served.post(b"{", headers={"Content-Type": "application/json"})
            assert answer.status == 424

    asyncio.run(run())


def test_streams(tmp_path: Path) -> None:
    async def run() -> None:
        async with handling(tmp_path) as (served, _):
            answer = await served.post({"do": "stream"})
            assert answer.body == b'{"outputs": ["a"]}\n{"outputs": ["b"]}\n'
            assert answer.headers["Content-Type"] == "application/jsonlines"
            assert answer.headers["Transfer-Encoding"] == "chunked"
            answer = await served.post({"do": "broken_at_once"})
            assert (answer.status, answer.body) == (424, b'{"code":424,"error":"first"}')
            answer = await served.post({"do": "broken_later"})
            assert answer.status == 200
            assert answer.body == b'{"outputs": ["a"]}\n{"code":424,"error":"later"}'

    asyncio.run(run())


def test_a_client_that_leaves_ends_its_stream(tmp_path: Path) -> None:
    async def run() -> None:
        async with handling(tmp_path) as (served, backend):
            async with served.client.post("/invocations", json={"do": "endless"}) as response:
                assert await response.content.read(100)
                assert backend.pool.num_running == 1
                response.close()
            await eventually(lambda: backend.pool.num_running == 0, 20)
            assert (await served.post({"do": "typed"})).status == 200
            assert backend.pool.num_failures == 0

    asyncio.run(run())


def server_error(answer: Any) -> tuple[int, str, str]:
    body = json.loads(answer.body)
    assert answer.status == body["code"]
    return body["code"], body["type"], body["message"]


def test_failures_of_processes(tmp_path: Path) -> None:
    async def run() -> None:
        async with handling(tmp_path, predict_timeout_s=1.5, retry_threshold=2) as (
            served,
            backend,
        ):
            assert server_error(await served.post({"do": "die"})) == (
                *(500, "EngineException"),
                "Python worker disconnected. (exit status 3)",
            )
            assert (await served.post({"do": "typed"})).status == 200
            status, kind, message = server_error(await served.post({"do": "loop"}))
            assert (status, kind) == (500, "EngineException")
            assert "within 1.5 s (option.predict_timeout)" in message
            assert (await served.post({"do": "typed"})).status == 200
            await served.post({"do": "die"})
            await eventually(lambda: not backend.healthy)
            status, kind, message = server_error(await served.post({"do": "typed"}))
            assert (status, kind) == (503, "WlmCapacityException")
            assert message.startswith("Worker queue capacity exceeded for model: model")
            async with served.client.get("/ping") as response:
                assert response.status == 500
                assert await response.json() == {"model": {"status": "FAILED"}}

    asyncio.run(run())


def test_a_stopped_process_is_a_400(tmp_path: Path) -> None:
    async def run() -> None:
        async with handling(tmp_path) as (served, backend):
            for _ in range(2):
                await served.post({"do": "die"})
            await eventually(lambda: backend.pool._is_pausing)
            async with served.client.get("/ping") as response:
                assert response.status == 200
                assert await response.json() == {"model": {"status": "Unhealthy"}}
            assert server_error(await served.post({"do": "typed"})) == (
                *(400, "TranslateException"),
                "Backend Python process is stopped.",
            )

    asyncio.run(run())


BATCHED = """
from djl_python import Output

def handle(inputs):
    if inputs.is_empty():
        return None
    output = Output()
    for item in inputs.get_batches():
        text = item.get_as_string()
        if text == "short":
            return output
        output.add(text * 2)
    return output
"""


def test_batches(tmp_path: Path) -> None:
    async def run() -> None:
        fields = {"batch_size": 4, "max_batch_delay_ms": 5000}
        async with handling(tmp_path, BATCHED, **fields) as (served, backend):
            answers = await asyncio.gather(*(served.post(str(i).encode()) for i in range(4)))
            assert [answer.body for answer in answers] == [b"00", b"11", b"22", b"33"]
            assert backend.pool.num_requests == 4
            texts = (b"short", b"a", b"b", b"c")
            answers = await asyncio.gather(*(served.post(text) for text in texts))
            assert {server_error(answer)[:2] for answer in answers} == {(400, "TranslateException")}
            message = server_error(answers[0])[2]
            assert message.startswith("Batch output size mismatch, expected: 4, actual: ")

    asyncio.run(run())


def test_other_protocols_say_who_answers(tmp_path: Path) -> None:
    async def run() -> None:
        async with handling(tmp_path) as (served, _):
            for path, body in (
                ("/v1/completions", {"model": "model", "prompt": "x"}),
                ("/tgi/generate", {"inputs": "x"}),
                ("/tgi/tokenize", {"inputs": "x"}),
            ):
                answer = await served.post(body, path)
                assert 400 <= answer.status < 500, path
                assert b"answers by its own handler" in answer.body
            async with served.client.get("/v1/models") as response:
                assert (await response.json())["data"][0]["id"] == "model"
            async with served.client.get("/metrics") as response:
                assert 'lmi_requests_total{model_name="model"} 0.0' in await response.text()

    asyncio.run(run())


def test_handlers_are_registered_and_scaled(tmp_path: Path) -> None:
    store = tmp_path / "store"
    directory = store / "late"
    directory.mkdir(parents=True)
    (directory / "model.py").write_text(BATCHED)
    config = ServerConfig(model_store=store, allow_custom_code=True, values={})
    registrar = ConfiguredRegistrar((), {}, config)
    options = ServerOptions(port=0, drain_timeout_s=5)

    async def run() -> None:
        models = ModelRegistry(options, Metrics(), [], registrar=registrar)
        async with models, serving_models(models) as served:

            async def manage(method: str, path: str) -> Any:
                async with served.client.request(method, path) as response:
                    assert response.status == 200, await response.text()
                    return await response.json()

            async def num_workers() -> int:
                (described,) = await manage("GET", "/models/late")
                (group,) = described["models"][0]["workerGroups"]
                assert all(worker["status"] == "READY" for worker in group["workers"])
                return len(group["workers"])

            await manage("POST", f"/models?url={directory}&min_worker=2")
            assert await num_workers() == 2
            assert (await served.post(b"a", "/predictions/late")).body == b"aa"
            await manage("PUT", "/models/late?min_worker=1&max_worker=1")
            async with asyncio.timeout(30):
                while await num_workers() != 1:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            await manage("PUT", "/models/late?min_worker=0&max_worker=0")
            assert await num_workers() == 0
            assert (await served.post(b"b", "/predictions/late")).status == 503
            await manage("PUT", "/models/late?min_worker=1&max_worker=1")
            assert (await served.post(b"c", "/predictions/late")).body == b"cc"
            await manage("DELETE", "/models/late")
            assert (await served.post(b"d", "/predictions/late")).status == 404
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())
