"""The management API, byte for byte, over scripted engines."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.server.harness import eventually
from tests.server.management.managed import check, fault, managed, pretty, status
from tests.server.models.test_models import LMI, lmi_text

SCALED = 'Workflow "x" worker scaled. New Worker configuration '


def test_register_by_query_and_serve() -> None:
    async def run() -> None:
        async with managed() as (served, registrar):
            answer = await served.ask("POST", "/models?url=/m/x&model_name=x&batch_size=2")
            check(answer, 200, status('Model "x" registered.'))
            assert registrar.asked == [{"url": "/m/x", "model_name": "x", "batch_size": "2"}]
            assert lmi_text(await served.post(LMI, "/models/x/invoke")) == " x"
            assert lmi_text(await served.post(LMI)) == " first"

    asyncio.run(run())


def test_register_by_json_as_sagemaker_does() -> None:
    async def run() -> None:
        async with managed() as (served, _):
            answer = await served.post({"model_name": "x", "url": "/m/x"}, "/models")
            check(answer, 200, status('Model "x" registered.'))
            answer = await served.post({"url": "/m/x"}, "/models")
            required = "Parameter model_name is required."
            check(answer, 400, fault(400, "BadRequestException", required))
            answer = await served.post({"url": ["/m/x"]}, "/models")
            assert (answer.status, b"plain values" in answer.body) == (400, True)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("query", "code", "kind", "message"),
    [
        ("", 400, "BadRequestException", "Parameter url is required."),
        (
            "?url=/m/x&model_name=first",
            409,
            "BadRequestException",
            "Workflow first is already registered.",
        ),
        (
            "?url=/m/x&synchronous=maybe",
            400,
            "BadRequestException",
            "Parameter synchronous is 'maybe'; allowed are true and false",
        ),
        ("?url=broken", 400, "ModelException", "config.json is missing"),
        ("?url=huge", 507, "WlmOutOfMemoryException", "the KV cache does not fit"),
        ("?url=crash", 500, "OSError", "disk on fire"),
    ],
)
def test_faults_of_registering(query: str, code: int, kind: str, message: str) -> None:
    async def run() -> None:
        async with managed() as (served, _):
            check(await served.ask("POST", f"/models{query}"), code, fault(code, kind, message))
            # What could not be loaded is not there.
            listed = json.loads((await served.ask("GET", "/models")).body)
            assert [model["modelName"] for model in listed["models"]] == ["first"]
            assert (await served.ask("GET", "/ping")).status == 200

    asyncio.run(run())


def test_register_without_waiting() -> None:
    async def run() -> None:
        async with managed() as (served, registrar):
            registrar.go_on.clear()
            answer = await served.ask("POST", "/models?url=/m/x&model_name=x&synchronous=false")
            check(answer, 202, status('Model "x" registration scheduled.'))
            assert b"PENDING" in (await served.ask("GET", "/ping")).body
            answer = await served.post(LMI, "/predictions/x")
            check(answer, 503, fault(503, "WlmException", "Model is not ready: x"))
            answer = await served.ask("PUT", "/models/x?max_worker=0&min_worker=0")
            check(answer, 503, fault(503, "WlmException", "Model is not ready: x"))
            registrar.go_on.set()
            await eventually(lambda: served.models.find("x").status == "Healthy")
            assert lmi_text(await served.post(LMI, "/predictions/x")) == " x"

            await served.ask("POST", "/models?url=broken&model_name=y&synchronous=false")
            await eventually(lambda: served.models.find("y").status == "FAILED")
            assert (await served.ask("GET", "/ping")).status == 500
            assert (await served.ask("DELETE", "/models/y")).status == 200
            assert (await served.ask("GET", "/ping")).status == 200

    asyncio.run(run())


def test_list_in_pages() -> None:
    async def run() -> None:
        async with managed() as (served, _):
            for name in ("x", "y"):
                await served.ask("POST", f"/models?url=/m/{name}&model_name={name}&model_version=2")
            first = {"modelName": "first", "modelUrl": "file:///store/first/", "status": "Healthy"}
            x, y = (
                {"modelName": n, "version": "2", "modelUrl": f"/m/{n}", "status": "Healthy"}
                for n in "xy"
            )
            every = pretty({"models": [first, x, y]})
            for path in ("/models", "/models?limit=101", "/models?limit=-1"):
                check(await served.ask("GET", path), 200, every)
            page = pretty({"models": [first, x], "nextPageToken": "2"})
            check(await served.ask("GET", "/models?limit=2"), 200, page)
            rest = await served.ask("GET", "/models?limit=2&next_page_token=2")
            check(rest, 200, pretty({"models": [y]}))
            bad = await served.ask("GET", "/models?limit=many")
            message = "Parameter limit is not a number: 'many'"
            check(bad, 400, fault(400, "BadRequestException", message))

    asyncio.run(run())


def test_describe() -> None:
    async def run() -> None:
        async with managed() as (served, _):
            answer = await served.ask("GET", "/models/first")
            described = json.loads(answer.body)
            worker = described[0]["models"][0]["workerGroups"][0]["workers"][0]
            assert worker.pop("startTime").endswith("Z")
            assert described == [
                {
                    "workflowName": "first",
                    "models": [
                        {
                            "modelName": "first",
                            "modelUrl": "file:///store/first/",
                            "batchSize": 1,
                            "maxBatchDelayMillis": 100,
                            "maxIdleSeconds": 60,
                            "queueSize": 1000,
                            "requestInQueue": 0,
                            "status": "Healthy",
                            "loadedAtStartup": True,
                            "workerGroups": [
                                {
                                    "device": {"deviceType": "cpu", "deviceId": -1},
                                    "minWorkers": 1,
                                    "maxWorkers": 1,
                                    "workers": [{"id": 1, "status": "READY"}],
                                }
                            ],
                        }
                    ],
                }
            ]
            await served.ask("POST", "/models?url=/m/x&model_name=x&model_version=1")
            await served.ask("POST", "/models?url=/m/x&model_name=x&model_version=2")
            both = json.loads((await served.ask("GET", "/models/x")).body)
            assert [item["version"] for item in both] == ["1", "2"]
            one = json.loads((await served.ask("GET", "/models/x/2")).body)
            assert [item["models"][0]["version"] for item in one] == ["2"]
            for path in ("/models/z", "/models/x/3"):
                missing = path.removeprefix("/models/").replace("/", ":")
                message = f"Model or workflow not found: {missing}"
                answer = await served.ask("GET", path)
                check(answer, 404, fault(404, "ModelNotFoundException", message))

    asyncio.run(run())


def test_scale_stops_and_starts() -> None:
    async def run() -> None:
        async with managed() as (served, _):
            await served.ask("POST", "/models?url=/m/x&model_name=x")
            answer = await served.ask("PUT", "/models/x?min_worker=0&max_worker=0")
            text = (
                'Workflow "x" worker scaled. New Worker configuration min workers:0 max workers:0'
            )
            check(answer, 200, status(text))
            refused = await served.post(LMI, "/predictions/x")
            message = "All model workers has been shutdown: x"
            check(refused, 503, fault(503, "WlmShutdownException", message))
            described = json.loads((await served.ask("GET", "/models/x")).body)
            assert described[0]["models"][0]["workerGroups"][0]["workers"] == []
            answer = await served.ask("PUT", "/models/x?min_worker=1")
            text = (
                'Workflow "x" worker scaled. New Worker configuration min workers:1 max workers:1'
            )
            check(answer, 200, status(text))
            assert lmi_text(await served.post(LMI, "/predictions/x")) == " x"
            for query, words in (
                ("min_worker=2&max_worker=1", "min_worker <= max_worker"),
                ("max_worker=4", "allowed are 0 and 1"),
                ("max_worker=some", "not a number"),
                ("device=gpu0", "device gpu0"),
            ):
                answer = await served.ask("PUT", f"/models/x?{query}")
                assert (answer.status, words in answer.body.decode()) == (400, True), query
            answer = await served.ask("PUT", "/models/z?min_worker=1")
            message = "Model or workflow not found: z"
            check(answer, 404, fault(404, "ModelNotFoundException", message))

    asyncio.run(run())


def test_scaling_down_lets_running_requests_finish() -> None:
    async def run() -> None:
        async with managed() as (served, registrar):
            await served.ask("POST", "/models?url=/m/x&model_name=x")
            registrar.engines["x"].delay_s = 0.02
            body = {**LMI, "parameters": {"max_new_tokens": 20}, "stream": True}
            running = asyncio.ensure_future(served.post(body, "/predictions/x"))
            await eventually(lambda: registrar.engines["x"].running)
            stopping = asyncio.ensure_future(
                served.ask("PUT", "/models/x?min_worker=0&max_worker=0")
            )
            await eventually(lambda: served.models.find("x").state == "stopped")
            message = "All model workers has been shutdown: x"
            refused = await served.post(LMI, "/predictions/x")
            check(refused, 503, fault(503, "WlmShutdownException", message))
            # Starting again waits for the end of the stop.
            assert (await served.ask("PUT", "/models/x?min_worker=1")).status == 200
            assert stopping.done()
            assert len((await running).body.splitlines()) == 20
            assert (await stopping).status == 200
            assert lmi_text(await served.post(LMI, "/predictions/x")) == " x"

    asyncio.run(run())


def test_unregister_while_loading() -> None:
    async def run() -> None:
        async with managed() as (served, registrar):
            registrar.go_on.clear()
            await served.ask("POST", "/models?url=/m/x&model_name=x&synchronous=false")
            leaving = asyncio.ensure_future(served.ask("DELETE", "/models/x"))
            await eventually(lambda: not served.models.versions("x"))
            refused = await served.post(LMI, "/predictions/x")
            assert refused.status == 404
            registrar.go_on.set()
            assert (await leaving).status == 200
            assert not served.models.has("x", None)
            assert not registrar.engines["x"].running

    asyncio.run(run())


def test_unregister_lets_running_requests_finish() -> None:
    async def run() -> None:
        async with managed() as (served, registrar):
            await served.ask("POST", "/models?url=/m/x&model_name=x")
            registrar.engines["x"].delay_s = 0.02
            body = {**LMI, "parameters": {"max_new_tokens": 20}, "stream": True}
            running = asyncio.ensure_future(served.post(body, "/predictions/x"))
            await eventually(lambda: registrar.engines["x"].running)
            leaving = asyncio.ensure_future(served.ask("DELETE", "/models/x"))
            await eventually(lambda: not served.models.versions("x"))
            assert not leaving.done()
            refused = await served.post(LMI, "/predictions/x")
            message = "Model or workflow not found: x"
            check(refused, 404, fault(404, "ModelNotFoundException", message))
            taken = await served.ask("POST", "/models?url=/m/x&model_name=x")
            assert taken.status == 409
            check(await leaving, 200, status('Model or workflow "x" unregistered'))
            assert len((await running).body.splitlines()) == 20
            assert (await served.ask("POST", "/models?url=/m/x&model_name=x")).status == 200
            gone = await served.ask("DELETE", "/models/z")
            message = "Model or workflow not found: z"
            check(gone, 404, fault(404, "ModelNotFoundException", message))

    asyncio.run(run())


def test_unregister_cuts_off_what_does_not_finish_and_goes_on_without_its_client() -> None:
    async def run() -> None:
        async with managed(drain_timeout_s=0.2) as (served, registrar):
            await served.ask("POST", "/models?url=/m/x&model_name=x")
            engine = registrar.engines["x"]
            engine.delay_s = 0.05
            body = {**LMI, "parameters": {"max_new_tokens": 20}, "stream": True}
            running = asyncio.ensure_future(served.post(body, "/predictions/x"))
            await eventually(lambda: engine.running)
            # The engine's end asserts that nothing runs in it; a real one aborts what does.
            running.cancel()
            leaving = asyncio.ensure_future(served.ask("DELETE", "/models/x"))
            await eventually(lambda: not served.models.versions("x"))
            leaving.cancel()
            await eventually(lambda: not served.models.has("x", None))
            assert not engine.running

    asyncio.run(run())


def test_the_only_model_may_leave() -> None:
    async def run() -> None:
        async with managed() as (served, _):
            assert (await served.ask("DELETE", "/models/first")).status == 200
            assert (await served.ask("GET", "/ping")).body == b"{}\n"
            answer = await served.post(LMI)
            message = "Parameter model_name is required."
            check(answer, 400, fault(400, "BadRequestException", message))
            await served.ask("POST", "/models?url=/m/x&model_name=x")
            assert lmi_text(await served.post(LMI, "/predictions/x")) == " x"

    asyncio.run(run())


def test_wrong_methods() -> None:
    async def run() -> None:
        async with managed() as (served, _):
            for method, path in (("DELETE", "/models"), ("PATCH", "/models/x")):
                answer = await served.ask(method, path)
                assert answer.status == 405
                assert json.loads(answer.body)["type"] == "MethodNotAllowedException"

    asyncio.run(run())


def test_adapters_are_not_enabled() -> None:
    async def run() -> None:
        async with managed() as (served, _):
            for method, path in (
                ("POST", "/models/first/adapters?name=a&src=/x"),
                ("POST", "/models/first/adapters/a/update"),
                ("GET", "/models/first/adapters"),
                ("DELETE", "/models/first/adapters/a"),
                ("GET", "/adapters"),
                ("GET", "/adapters/a"),
            ):
                answer = await served.ask(method, path)
                check(answer, 400, fault(400, "BadRequestException", "LoRA is not enabled."))
            answer = await served.ask("GET", "/models/z/adapters")
            message = "The model z was not found"
            check(answer, 404, fault(404, "ModelNotFoundException", message))

    asyncio.run(run())
