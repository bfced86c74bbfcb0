"""Ranks whose steps C++ launches give, to the bit, what the same kernels give launched from Python
and summed in the order of ranks: in the emulator of a GPU each, with a stand-in for NCCL between
them, or on two GPUs, which nearly do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lmi_core.engine.engine import Engine
from lmi_core.engine.outputs import TokenEvent
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import EngineError
from lmi_core.settings.engine_config import EngineConfig
from tests.engine.harness import collect, run, until

torch = pytest.importorskip("torch", exc_type=ImportError)

from lmi_core.ops.kernels.cuda.library import Library  # noqa: E402
from lmi_core.runners.device.cuda_runner import CudaRunner  # noqa: E402
from lmi_core.runners.device.device_runner import load_device_runner  # noqa: E402
from tests.runners.device.cuda_harness import (  # noqa: E402
    CPP,
    PYTHON,
    assert_alike,
    configured,
    device,
    prompts,
    rows_ahead,
)
from tests.watched import shows_less  # noqa: E402

__all__ = ["device", "rows_ahead"]  # fixtures
pytestmark = [pytest.mark.usefixtures("device"), pytest.mark.timeout(300)]
FAILS, DIES = "LMI_NCCL_EMULATOR_FAILS", "LMI_NCCL_EMULATOR_DIES"
SAMPLED = SamplingParams(ignore_eos=True, temperature=0.7, seed=5, logprobs=2, max_new_tokens=5)


@pytest.fixture(autouse=True)
def _devices(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("ranks want a GPU each")


def of(family: str, degree: int = 2, **changes: object) -> EngineConfig:
    settings = {"quantize": "int4", "max_model_len": 100, **changes}
    return configured(family, tensor_parallel_degree=degree, **settings)


async def one_by_one(engine: Engine) -> list[list[TokenEvent]]:
    """Prompts in several steps, and in one."""
    results = []
    for seed, prompt in enumerate(prompts(3, 70)):
        params = replace(SAMPLED, seed=seed, max_new_tokens=4)
        results.append(without_times(await collect(engine, list(prompt), params)))
    return results


async def together(engine: Engine) -> list[list[TokenEvent]]:
    """Others go on in other rows when one has ended."""
    wanted = zip(prompts(2, 2, 2), (3, 7, 9), strict=True)
    calls = (
        collect(engine, list(prompt), replace(SAMPLED, max_new_tokens=count))
        for prompt, count in wanted
    )
    return [without_times(events) for events in await asyncio.gather(*calls)]


def without_times(events: list[TokenEvent]) -> list[TokenEvent]:
    return [replace(event, queue_seconds=0.0, request_id="") for event in events]


def assert_near(results: list[list[TokenEvent]], expected: list[list[TokenEvent]]) -> None:
    """Where sums go another way."""
    for events, others in zip(results, expected, strict=True):
        assert [event.token_id for event in events] == [event.token_id for event in others]
        assert [event.logprob for event in events] == pytest.approx(
            [event.logprob for event in others], abs=0.02
        )


async def whole(family: str) -> list[list[TokenEvent]]:
    """What one process gives."""
    async with Engine(of(family, 1, quantize=None)) as engine:
        return await one_by_one(engine)


async def assert_as_whole(engine: Engine, expected: list[list[TokenEvent]]) -> None:
    assert engine.info.runner.num_ranks == 2
    assert engine._parts is not None
    assert isinstance(engine._parts.runner, CudaRunner), "C++ doesn't launch the steps"
    assert_near(await one_by_one(engine), expected)


async def captured(engine: Engine, runner: CudaRunner, rows: list[list[int]]) -> None:
    """Ranks capture together when there is nothing to do; tokens go from step to step on the
    devices, also to other rows when some have ended."""
    first = await together(engine)
    assert [1, 2] in rows
    await until(lambda: runner._steps.list.state().num_captured >= 2, 60)
    assert await together(engine) == first
    state = runner._steps.list.state()
    assert (state.num_replayed > 0, state.capture_error) == (True, "")


async def lost(engine: Engine, why: str, end: Callable[[], None] = lambda: None) -> None:
    """Requests fail by name; that the engine closes shows that nothing waits for NCCL."""
    events = engine.generate((5, 6, 7), replace(SAMPLED, max_new_tokens=80))
    await anext(events)
    end()
    with pytest.raises(EngineError, match=why):
        async for _ in events:
            pass
    assert not engine.healthy


@pytest.mark.slow
def test_ranks_give_the_same_bits_run_ahead_and_end_together(
    rows_ahead: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As launched from Python, whatever else goes on, of experts that some rows take and one that
    all do; one engine for all of it, since starting ranks takes longest."""
    is_watched = shows_less()  # where free rows of captured steps write to one block, unread

    async def from_python() -> list[list[TokenEvent]]:
        async with Engine(of("qwen2_moe")) as engine:
            return await one_by_one(engine)

    async def main(expected: list[list[TokenEvent]]) -> None:
        async with Engine(of("qwen2_moe", enforce_eager=is_watched)) as engine:
            assert engine.info.runner.num_ranks == 2
            assert engine._parts is not None
            runner = engine._parts.runner
            assert isinstance(runner, CudaRunner), "C++ doesn't launch the steps"
            assert_alike(await one_by_one(engine), expected)
            if not is_watched:
                await captured(engine, runner, rows_ahead)
            assert runner._ranks is not None
            await lost(engine, r"rank 1 of 2 ended \(signal 9\)", runner._ranks._processes[0].kill)

    monkeypatch.setenv("LMI_OPS", PYTHON)
    expected = run(from_python(), 140)
    monkeypatch.setenv("LMI_OPS", CPP)
    run(main(expected), 140)


@pytest.mark.slow
def test_norms_over_all_heads_and_a_rank_that_fails_and_lives(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Which ends requests."""
    armed = tmp_path / "armed"
    monkeypatch.setenv("LMI_OPS", CPP)
    monkeypatch.setenv(FAILS, f"1:{armed}")

    async def main(expected: list[list[TokenEvent]]) -> None:
        async with Engine(of("olmoe", quantize=None)) as engine:
            await assert_as_whole(engine, expected)
            if device.type != "cuda":  # NCCL's stand-in fails
                await lost(engine, "rank 1 failed: .* of NCCL: system error", armed.touch)

    run(main(run(whole("olmoe"), 140)), 140)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_heads_over_one_latent(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which every rank makes and keeps, with and without a latent of queries."""
    monkeypatch.setenv("LMI_OPS", CPP)

    async def main(expected: list[list[TokenEvent]]) -> None:
        async with Engine(of(family, quantize=None)) as engine:
            await assert_as_whole(engine, expected)

    run(main(run(whole(family), 140)), 140)


def test_a_rank_that_is_gone_while_ranks_load_is_said(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cuda":
        pytest.skip(f"{DIES} is the stand-in's")
    monkeypatch.setenv("LMI_OPS", CPP)
    monkeypatch.setenv(DIES, "1")
    with pytest.raises(EngineError, match=r"rank 1 ended while it loaded .* \(signal 9\)"):
        load_device_runner(of("llama3"))


def test_what_keeps_ranks_from_meeting_is_said_before_weights_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LMI_OPS", CPP)
    monkeypatch.setenv("LMI_NCCL_LIBRARY", "/nowhere/libnccl.so.2")
    monkeypatch.setattr(Library, "open_nccl", lambda _, name: f"NCCL: {name}: no such file")
    monkeypatch.setattr("lmi_core.models.loader.load_weights", lambda *_: pytest.fail("too late"))
    with pytest.raises(EngineError, match="by NCCL, which can't be opened: NCCL: /nowhere/libnccl"):
        load_device_runner(of("llama3"))
