"""Tenants: what one API key does is no other's business."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from lmi_core.config.resolve import resolve
from lmi_core.errors import LmiError
from lmi_server.dialects.base import HttpError
from lmi_server.http.metrics import Metrics, RequestMeter
from lmi_server.http.tenants import Tenant, TenantLimits
from lmi_server.models.loading import server_options
from tests.checkpoints import cached_checkpoint
from tests.config.cases import CPU, NO_CACHE
from tests.engine.fake_runner import FakeRunner
from tests.engine.harness import make_engine
from tests.server.configured import configured
from tests.server.fake_engine import FakeEngine
from tests.server.harness import Answer, Served, eventually, serving, serving_backend

KEYS = ("first", "second")
SLOW = {"inputs": "a", "parameters": {"max_new_tokens": 2000}}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def complete(served: Served, key: str, **fields: Any) -> int:
    """The cached tokens that a completion's usage tells the holder of ``key``."""
    body = {"model": "model", "prompt": "the same system prompt " * 8, "max_tokens": 2, **fields}
    answer = await served.post(body, "/v1/completions", headers=bearer(key))
    assert answer.status == 200, answer.body
    return int(json.loads(answer.body)["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("shared", [False, True])
def test_keys_share_no_prefixes(shared: bool) -> None:
    async def run() -> None:
        metrics = Metrics()
        keys = (f"api_keys={','.join(KEYS)}", f"share_prefix_cache={shared}")
        async with (
            make_engine(FakeRunner(num_blocks=200)) as engine,
            serving_backend(engine, metrics, **configured(*keys)) as served,
        ):
            assert await complete(served, "first") == 0
            assert await complete(served, "first") > 0
            assert (await complete(served, "second") > 0) is shared
            assert await complete(served, "first", cache_salt="own") == 0
            assert await complete(served, "first", cache_salt="own") > 0

    asyncio.run(run())


def test_no_client_can_write_anothers_salt() -> None:
    async def run() -> None:
        engine = FakeEngine()
        async with serving(engine, api_keys=KEYS) as served:
            for key in KEYS:
                await complete(served, key)
                await complete(served, key, cache_salt="x")
        salts = [request.cache_salt for request in engine.requests]
        assert len(set(salts)) == 4
        assert all(len(salt.partition("/")[0]) == 64 for salt in salts)
        only = FakeEngine()
        async with serving(only, api_keys=KEYS[:1]) as served:
            await complete(served, "first", cache_salt="x")
        assert [request.cache_salt for request in only.requests] == ["x"]

    asyncio.run(run())


def test_a_key_does_not_wait_for_what_another_has_asked() -> None:
    async def run() -> None:
        all_there = threading.Event()
        runner = FakeRunner(num_blocks=400, max_num_seqs=4)
        runner.fail_step = lambda number: "" if all_there.wait(20) else "not all came"
        keys = configured(f"api_keys={','.join(KEYS)}")
        body = {"inputs": "a", "parameters": {"max_new_tokens": 60}}
        async with (
            make_engine(runner, eos_ids=()) as engine,
            serving_backend(engine, Metrics(), **keys) as served,
        ):
            post = served.post
            flood = [asyncio.create_task(post(body, headers=bearer("first"))) for _ in range(40)]
            await eventually(lambda: engine.stats().totals.num_requests == len(flood))
            light = asyncio.create_task(post(body, headers=bearer("second")))
            await eventually(lambda: engine.stats().totals.num_requests == len(flood) + 1)
            all_there.set()
            assert (await light).status == 200
            assert sum(task.done() for task in flood) < 20
            assert {answer.status for answer in await asyncio.gather(*flood)} == {200}

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/invocations", {"inputs": "a"}),
        ("/generate", {"inputs": "a"}),
        ("/v1/completions", {"model": "model", "prompt": "a"}),
    ],
)
def test_requests_in_flight(path: str, body: dict[str, Any]) -> None:
    async def run() -> None:
        engine = FakeEngine(delay_s=0.01)
        keys = configured("max_tenant_requests=1", f"api_keys={','.join(KEYS)}")
        async with serving(engine, **keys) as served:
            slow = asyncio.create_task(served.post(SLOW, headers=bearer("first")))
            await eventually(lambda: engine.running)
            refused = await served.post(body, path, headers=bearer("first"))
            assert (refused.status, refused.headers["Retry-After"]) == (429, "1"), refused.body
            assert b"max_tenant_requests" in refused.body
            other = await served.post({"inputs": "a"}, headers=bearer("second"))
            assert other.status == 200
            assert (await served.ask("GET", "/health")).status == 200
            slow.cancel()
            await asyncio.gather(slow, return_exceptions=True)
            await eventually(lambda: not engine.running)
            again = await served.post({"inputs": "a"}, headers=bearer("first"))
            assert again.status == 200

    asyncio.run(run())


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def ask(tenant: Tenant, num_tokens: int) -> None:
    meter = RequestMeter("id")
    with tenant.enter(meter):
        meter.num_prompt_tokens = num_tokens


def retry_after(tenant: Tenant) -> int:
    with pytest.raises(HttpError) as refused, tenant.enter(RequestMeter("id")):
        pass
    assert refused.value.status == 429
    return int(refused.value.headers["Retry-After"])


def test_tokens_a_minute() -> None:
    clock = Clock()
    tenant = Tenant(TenantLimits(tokens_per_minute=60), clock=clock)
    ask(tenant, 59)
    ask(tenant, 41)
    assert retry_after(tenant) == 40
    clock.now += 39.5
    assert retry_after(tenant) == 1
    clock.now += 1
    ask(tenant, 0)
    # No more than a minute's worth is saved up.
    clock.now += 3600
    ask(tenant, 60)
    assert retry_after(tenant) == 1


def test_calls_in_flight_pay_as_they_go() -> None:
    tenant = Tenant(TenantLimits(tokens_per_minute=60), clock=Clock())
    meter = RequestMeter("id")
    with tenant.enter(meter):
        meter.num_prompt_tokens, meter.num_generated_tokens = 50, 20
        assert retry_after(tenant) == 10
        meter.num_generated_tokens = 30
    assert retry_after(tenant) == 20


def test_a_key_that_used_its_tokens_waits_alone() -> None:
    async def run() -> None:
        keys = configured("max_tenant_tokens_per_minute=10", f"api_keys={','.join(KEYS)}")
        async with serving(FakeEngine(), **keys) as served:

            async def generate(key: str) -> Answer:
                body = {"inputs": "a b c", "parameters": {"max_new_tokens": 20}}
                return await served.post(body, headers=bearer(key))

            assert (await generate("first")).status == 200
            refused = await generate("first")
            assert refused.status == 429
            assert 10 < int(refused.headers["Retry-After"]) <= 120
            assert (await generate("second")).status == 200

    asyncio.run(run())


def test_callers_without_a_key_are_one_tenant() -> None:
    async def run() -> None:
        async with serving(FakeEngine(), tenant_limits=TenantLimits(tokens_per_minute=1)) as served:
            assert (await served.post({"inputs": "a"})).status == 200
            assert (await served.post({"inputs": "a"})).status == 429

    asyncio.run(run())


def test_keys_come_from_the_configuration() -> None:
    model = str(cached_checkpoint("llama2"))
    environ = {
        **NO_CACHE,
        "SERVING_API_KEYS": "a, b",
        "SERVING_MAX_TENANT_REQUESTS": "3",
        "SERVING_MAX_TENANT_TOKENS_PER_MINUTE": "1000",
        "SERVING_SHARE_PREFIX_CACHE": "true",
    }
    options = server_options(resolve([model, "--api-key", "c"], environ, CPU).server)
    assert options.api_keys == ("c", "a", "b")
    assert options.tenant_limits == TenantLimits(max_requests=3, tokens_per_minute=1000)
    assert options.shares_prefix_cache
    assert "'a'" not in repr(options)
    with pytest.raises(LmiError, match="max_tenant_requests"):
        resolve([model], {**environ, "SERVING_MAX_TENANT_REQUESTS": "0"}, CPU)
