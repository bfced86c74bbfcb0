"""Every management call has its line in the log."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.server.management.managed import managed
from tests.server.models.test_models import LMI


def test_each_call_has_a_line(caplog: pytest.LogCaptureFixture) -> None:
    url = "http://user:pw@store/m.zip?token=secret"

    async def run() -> None:
        async with managed(admin_key="boss") as (served, _):
            key = {"Authorization": "Bearer boss", "X-Forwarded-For": "10.0.0.9"}
            body = {"url": url, "model_name": "x", "synchronous": True}
            await served.post(body, "/models", headers=key)
            await served.ask("PUT", "/models/x?min_worker=0", headers=key)
            await served.ask("DELETE", "/models/nobody", headers={"Authorization": "Bearer b"})
            await served.post(LMI, "/models/first/invoke")

    with caplog.at_level("INFO", "lmi_server.management.audit"):
        asyncio.run(run())
    lines: list[dict[str, Any]] = [
        vars(record)["fields"]
        for record in caplog.records
        if record.name == "lmi_server.management.audit"
    ]
    registered, scaled, refused = lines
    assert registered.pop("id") != scaled.pop("id")
    assert registered == {
        "peer": "127.0.0.1",
        "by": "admin key",
        "method": "POST",
        "path": "/models",
        "status": 200,
        "forwarded_for": "10.0.0.9",
        "url": "http://store/m.zip",
        "model_name": "x",
        "synchronous": "true",
    }
    assert (scaled["min_worker"], scaled["status"]) == ("0", 200)
    assert (refused["path"], refused["status"]) == ("/models/nobody", 401)
    assert "boss" not in caplog.text
    assert "secret" not in caplog.text
