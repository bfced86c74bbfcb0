"""From the server's configuration to its options, and from its keys to what it does."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from lmi_core.config.resolve import resolve
from lmi_core.config.targets.server_config import ServerConfig
from lmi_core.demo import MODEL_DIR
from lmi_core.settings.batch_config import BatchConfig
from lmi_core.settings.record_config import RecordConfig
from lmi_server.dialects.lmi.options import LmiOptions
from lmi_server.http.logging import setup_logging
from lmi_server.http.options import Listening, ServerOptions
from lmi_server.http.tenants import TenantLimits
from lmi_server.models.loading import server_options
from tests.server.fake_engine import FakeEngine
from tests.server.harness import Served, eventually, serving

USUAL = ServerConfig(values={})
CHANGED: dict[str, tuple[Any, str, Any]] = {
    "host": ("::1", "host", "::1"),
    "port": (9999, "port", 9999),
    "api": ("tgi", "api", "tgi"),
    "api_keys": (("k",), "api_keys", ("k",)),
    "max_tenant_requests": (3, "tenant_limits", TenantLimits(max_requests=3)),
    "max_tenant_tokens_per_minute": (9, "tenant_limits", TenantLimits(tokens_per_minute=9)),
    "share_prefix_cache": (True, "shares_prefix_cache", True),
    "ui": (True, "ui", True),
    "strict_requests": (True, "strict_requests", True),
    "cors_origins": (("https://a",), "cors_origins", ("https://a",)),
    "cors_methods": ("PUT", "cors_methods", "PUT"),
    "cors_headers": ("x-a", "cors_headers", "x-a"),
    "request_id_header": ("x-mine", "request_id_header", "x-mine"),
    "error_rates": ({"any": (3, 9.0)}, "error_rates", {"any": (3, 9.0)}),
    "statuses": ({"wlm_error": 599}, "lmi", LmiOptions(statuses={"wlm_error": 599})),
    "max_request_size_bytes": (77, "max_request_bytes", 77),
    "response_store_bytes": (5, "response_store_bytes", 5),
    "record": (
        RecordConfig(directory=Path("r")),
        "record",
        RecordConfig(directory=Path("r")),
    ),
    "batch": (BatchConfig(directory=Path("b")), "batch", BatchConfig(directory=Path("b"))),
    "otlp_endpoint": ("http://c:4317", "otlp_endpoint", "http://c:4317"),
    "otlp_service_name": ("mine", "otlp_service_name", "mine"),
    "receive_timeout_s": (1.5, "receive_timeout_s", 1.5),
    "drain_timeout_s": (7, "drain_timeout_s", 7),
    "log_format": ("json", "log_format", "json"),
    "verbose": (True, "verbose", True),
    "admin_key": ("boss", "admin_key", "boss"),
    "open_management": (True, "open_management", True),
    "wait_model_loading": (False, "wait_for_models", False),
    "allow_multi_status": (True, "allow_multi_status", True),
}
"""By the field of the configuration: another value, the option that it is for, and that one's."""
ELSEWHERE = {
    "management": "test_a_management_address",
    "scheme": "TLS",
    "certificate_file": "TLS",
    "private_key_file": "TLS",
    "log_level": "setup_logging",
    "download_dir": "fetching",
    "hub_cache": "fetching",
    "offline": "fetching",
    "tgi_version": "a model's options",
    "enable_prefill_logprobs": "a model's options",
    "disable_grammar_support": "a model's options",
    "ignore_watermark": "a model's options",
    "compute_type": "a model's options",
    "max_best_of": "a model's options",
    "max_stop_sequences": "a model's options",
    "max_top_n_tokens": "a model's options",
    "max_client_batch_size": "a model's options",
    "allow_custom_code": "registration",
    "max_archive_bytes": "registration",
    "metric_aliases": "the metrics",
    "model_store": "registration",
    "model_url_pattern": "registration",
    "values": "explain",
}
"""Fields that are no options of the server as a whole, and whose they are."""


def test_every_field_is_known_here() -> None:
    assert CHANGED.keys() | ELSEWHERE.keys() == {field.name for field in fields(ServerConfig)}
    assert not CHANGED.keys() & ELSEWHERE.keys()


@pytest.mark.parametrize("name", CHANGED)
def test_every_field_reaches_its_option_and_no_other(name: str) -> None:
    value, option, expected = CHANGED[name]
    usual, options = server_options(USUAL), server_options(replace(USUAL, **{name: value}))
    assert getattr(options, option) == expected != getattr(usual, option)
    assert replace(options, **{option: getattr(usual, option)}) == usual


def test_a_management_address() -> None:
    options = server_options(configured(SERVING_MANAGEMENT_ADDRESS="http://127.0.0.1:9998"))
    assert options.management == Listening("127.0.0.1", 9998)


def configured(*argv: str, **environ: str) -> ServerConfig:
    return resolve([str(MODEL_DIR), *argv], {"LMI_CACHE_DIR": "", **environ}).server


@asynccontextmanager
async def served_as(
    config: ServerConfig, engine: FakeEngine | None = None, **changes: Any
) -> AsyncIterator[Served]:
    options = {f.name: getattr(server_options(config), f.name) for f in fields(ServerOptions)}
    del options["port"]
    async with serving(engine, **{**options, **changes}) as served:
        yield served


def test_request_timeout() -> None:
    async def run() -> None:
        async with served_as(configured("--request-timeout", "0.05")) as served:
            head = b"POST /invocations HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"
            assert (await served.raw(head)).startswith(b"HTTP/1.1 408 ")

    asyncio.run(run())


def test_graceful_termination_timeout() -> None:
    """A stopping server waits for a request for so long: not at all, or until it has ended."""

    async def run(timeout_s: int, num_tokens: int) -> bool:
        engine = FakeEngine(delay_s=0.005)
        config = configured("--drain-timeout", str(timeout_s))
        async with served_as(config, engine) as served:
            asked = {"prompt": "a", "max_tokens": num_tokens, "stream": True}
            call = asyncio.create_task(served.post(asked, "/v1/completions"))
            await eventually(lambda: engine.running)
            await served.server.stop(asyncio.Event())
            try:
                return b"[DONE]" in (await call).body
            except Exception:  # the connection was cut
                return False

    assert asyncio.run(run(60, 40))
    assert not asyncio.run(run(0, 4000))


def test_error_rates() -> None:
    async def run() -> None:
        config = configured(SERVING_ERROR_RATE_ANY="0/PT60S")
        async with served_as(config, FakeEngine(fail_after=0)) as served:
            assert (await served.ask("GET", "/ping")).status == 200
            assert (await served.post({"prompt": "a"}, "/v1/completions")).status == 500
            assert (await served.ask("GET", "/ping")).status == 503

    asyncio.run(run())


def test_admin_key() -> None:
    async def run() -> None:
        async with served_as(configured("--admin-key", "boss")) as served:
            assert (await served.ask("GET", "/models")).status == 401
            headers = {"Authorization": "Bearer boss"}
            assert (await served.ask("GET", "/models", headers=headers)).status == 200

    asyncio.run(run())


@pytest.mark.parametrize(("value", "status"), [("false", 404), ("true", 200)])
def test_open_management(value: str, status: int) -> None:
    async def run() -> None:
        config = configured("--host", "0.0.0.0", SERVING_OPEN_MANAGEMENT=value)
        async with served_as(config) as served:
            assert (await served.ask("GET", "/models")).status == status

    asyncio.run(run())


def test_log_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``lmi serve`` sets it up: one JSON object a line, of a request as of everything."""
    written = io.StringIO()
    monkeypatch.setattr("sys.stderr", written)
    root = logging.getLogger()
    before = root.handlers[:], root.level

    async def run() -> None:
        config = configured("--log-format", "json")
        setup_logging(server_options(config).log_format, config.log_level)
        async with served_as(config) as served:
            assert (await served.ask("GET", "/ping")).status == 200

    try:
        asyncio.run(run())
    finally:
        root.handlers[:], root.level = before
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    assert any(line.get("path") == "/ping" for line in lines), lines
