"""Failures are counted by kind, and too many in a window make the server unhealthy for good."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lmi_core.errors import CapacityError, EngineError, UserError
from lmi_server.dialects.base import HttpError
from lmi_server.http.error_rates import ErrorRates
from tests.server.configured import configured
from tests.server.fake_engine import FakeEngine
from tests.server.harness import serving

FAILURES = {
    "wlm": [CapacityError("full"), HttpError(503, "WlmException", "closing")],
    "model": [EngineError("a step failed")],
    "server": [RuntimeError("a fault"), HttpError(500, "InternalServerException", "x")],
    "": [UserError("a mistake"), HttpError(404, "ResourceNotFoundException", "no route")],
}


@pytest.mark.parametrize("kind", FAILURES)
@pytest.mark.parametrize("watched", ["wlm", "model", "server", "any"])
def test_kinds_of_failures(kind: str, watched: str) -> None:
    for error in FAILURES[kind]:
        rates = ErrorRates({watched: (0, 60.0)})
        rates.count(error)
        assert (rates.exceeded is not None) == (kind != "" and watched in (kind, "any"))


def test_failures_count_within_their_window() -> None:
    rates = ErrorRates({"model": (2, 10.0)})
    for now_s in (0.0, 1.0, 11.5, 12.0):
        rates.count(EngineError("x"), now_s)
        assert rates.exceeded is None
    rates.count(EngineError("x"), 13.0)
    assert rates.exceeded == "model"
    rates.count(EngineError("x"), 1000.0)
    assert rates.exceeded == "model"


@pytest.mark.parametrize("kind", ["wlm", "model", "server", "any"])
def test_ping_answers_503_from_then_on(kind: str) -> None:
    class Failing(FakeEngine):
        def generate_batches(self, request: object) -> Any:
            raise FAILURES["model" if kind == "any" else kind][0]

    async def run() -> None:
        engine = Failing()
        async with serving(engine, **configured(f"error_rate_{kind}=1/PT60S")) as served:
            for status in (200, 200, 503, 503):
                assert (await served.ask("GET", "/ping")).status == status
                assert (await served.post({"inputs": "a"})).status >= 424

    asyncio.run(run())
