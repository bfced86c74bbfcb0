"""Engines whose steps C++ launches, beside those launched from Python, for tests."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmi_core import _native
from lmi_core.engine import loop
from lmi_core.engine.engine import Engine
from lmi_core.engine.outputs import TokenEvent
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.engine.stats import EngineTotals
from lmi_core.ops.device.step_list import StepListSizes, StepListState
from lmi_core.runners.device import cuda_model
from lmi_core.runners.device.cuda_runner import CudaRunner
from lmi_core.settings.engine_config import EngineConfig
from tests.checkpoints import cached_checkpoint
from tests.engine.harness import assert_nothing_leaked, collect, run
from tests.ops.cuda_kernels import use_cuda_kernels
from tests.ops.device_ops import DEVICES
from tests.runners.device.torch_harness import config_of
from tests.watched import shows_less

CPP, PYTHON = "native", "native,launch:torch"
Request = tuple[tuple[int, ...], SamplingParams]
CONFIG = SimpleNamespace(device="torch-cpu")
"""Where the present test runs."""
STATES: list[StepListState] = []
"""Of the step lists that were closed."""
TOTALS: list[EngineTotals] = []
"""Of the engines that were stopped."""


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    chosen = torch.device(request.param)
    use_cuda_kernels(chosen, monkeypatch)
    monkeypatch.setattr(CONFIG, "device", "cuda" if request.param == "cuda" else "torch-cpu")
    STATES.clear()
    close = CudaRunner.close

    def note_and_close(self: CudaRunner) -> None:
        if self._worker is not None:
            self._worker.drain()
            STATES.append(self._steps.list.state())
        close(self)

    monkeypatch.setattr(CudaRunner, "close", note_and_close)
    return chosen


@pytest.fixture
def rows_ahead(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Of each step that is submitted ahead the logit rows that it follows, whatever steps take."""
    rows: list[list[int]] = []
    submit_ahead = CudaRunner.submit_ahead

    def note(self: CudaRunner, step: _native.Step, logit_rows: list[int]) -> None:
        rows.append(logit_rows)
        submit_ahead(self, step, logit_rows)

    monkeypatch.setattr(CudaRunner, "submit_ahead", note)
    monkeypatch.setattr(loop, "MAX_AHEAD_S", 1e3)  # the emulator takes its time
    monkeypatch.setattr(loop, "LEAD_S", 1e3)
    return rows


def configured(variant: str = "llama2", **changes: object) -> EngineConfig:
    model = cached_checkpoint(variant, dtype="bfloat16")
    settings = {"dtype": "auto", "enforce_eager": True, **changes}
    return config_of(model, CONFIG.device, **settings)


async def outcomes(config: EngineConfig, wanted: list[Request]) -> list[list[TokenEvent]]:
    async with Engine(config, check_integrity=True) as engine:
        results = await asyncio.gather(*(collect(engine, list(p), params) for p, params in wanted))
        await assert_nothing_leaked(engine)
        TOTALS.append(engine.stats().totals)
    return [
        [replace(event, queue_seconds=0.0) for event in sorted(events, key=lambda e: e.choice)]
        for events in results
    ]


def assert_same(
    config: EngineConfig, wanted: list[Request], monkeypatch: pytest.MonkeyPatch
) -> list[list[TokenEvent]]:
    """Kernels that are watched for races are launched from C++ alone: they are the same ones."""
    is_watched = shows_less()
    monkeypatch.setenv("LMI_OPS", PYTHON)
    expected = [] if is_watched else run(outcomes(config, wanted), 110)
    monkeypatch.setenv("LMI_OPS", CPP)
    results = run(outcomes(config, wanted), 110)
    if not is_watched:
        assert_alike(results, expected)
    return results


def assert_alike(results: list[list[TokenEvent]], expected: list[list[TokenEvent]]) -> None:
    """To the bit; on a GPU only nearly so, since the library for products of many rows rounds by
    their number, which requests' arrival decides."""
    if CONFIG.device != "cuda":
        assert results == expected
        return
    for events, others in zip(results, expected, strict=True):
        assert [event.token_id for event in events] == [event.token_id for event in others]
        assert [event.logprob for event in events] == pytest.approx(
            [event.logprob for event in others], abs=0.02
        )


def prompts(*lengths: int) -> list[tuple[int, ...]]:
    return [
        tuple(range(30 + number, 30 + number + length)) for number, length in enumerate(lengths)
    ]


def shrink_lists(monkeypatch: pytest.MonkeyPatch, **sizes: int) -> None:
    """Launched from C++, by lists for smaller steps than there will be; those of a GPU's memory
    aren't measured, which would run the widest."""

    def shrunk(**wanted: Any) -> StepListSizes:
        return StepListSizes(**{**wanted, **sizes})

    monkeypatch.setenv("LMI_OPS", CPP)
    monkeypatch.setattr(cuda_model, "memory_of", lambda _: None)
    monkeypatch.setattr(cuda_model, "StepListSizes", shrunk)
