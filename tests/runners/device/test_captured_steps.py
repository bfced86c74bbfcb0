"""Decode steps that C++ captures into graphs, and the memory that they take."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest

from lmi_core.engine import loop
from lmi_core.engine.engine import Engine
from lmi_core.engine.sampling_params import SamplingParams
from tests.engine.harness import collect, run, until

torch = pytest.importorskip("torch", exc_type=ImportError)

from lmi_core.ops.device import packed_weight  # noqa: E402
from lmi_core.runners.device import (  # noqa: E402
    cuda_model,
    decode_graphs,
    torch_runner,
)
from lmi_core.runners.device.cuda_runner import CudaRunner  # noqa: E402
from tests.ops.cuda_kernels import EMULATOR, RACES  # noqa: E402
from tests.runners.device.cuda_harness import (  # noqa: E402
    CPP,
    STATES,
    assert_same,
    configured,
    device,
    outcomes,
    prompts,
    shrink_lists,
)
from tests.runners.device.torch_harness import requests  # noqa: E402

__all__ = ["device"]  # a fixture
pytestmark = [
    pytest.mark.usefixtures("device"),
    pytest.mark.skipif(EMULATOR == RACES, reason="free rows write to one block, unread"),
]


class Rerun:
    """Captures by keeping the function, as a stand-in for ``CudaCapture``."""

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run


def test_unpacked_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prompts and of captured decode steps; some steps have few rows."""
    monkeypatch.setattr(packed_weight, "MAX_PACKED_ROWS", 2)
    monkeypatch.setattr(torch_runner, "make_capture", lambda *_: Rerun())
    monkeypatch.setattr(decode_graphs, "NUM_MISSES", 1)
    params = SamplingParams(max_new_tokens=4, ignore_eos=True, logprobs=2)
    wanted = [(prompt, params) for prompt in prompts(3, 20, 2, 5)]
    config = configured(quantize="int4", overlap=False, enforce_eager=False)
    unpacked = assert_same(config, wanted, monkeypatch)
    assert STATES[-1].num_captured >= 1
    monkeypatch.setattr(packed_weight, "MAX_PACKED_ROWS", 128)
    assert run(outcomes(config, wanted), 110) != unpacked


@pytest.mark.parametrize(
    ("variant", "overlap"),
    [("llama2", False), ("llama2", True), ("mixtral", True), ("deepseek_v3", True)],
)
def test_captured_decode_steps(
    variant: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded to the same shapes from the first step on, both launchers give the same bits."""
    monkeypatch.setattr(torch_runner, "make_capture", lambda *_: Rerun())
    monkeypatch.setattr(decode_graphs, "NUM_MISSES", 1)
    monkeypatch.setattr(decode_graphs, "FIRST_NUM_KEYS", 32)
    monkeypatch.setattr(loop, "MAX_AHEAD_S", 1e3)
    monkeypatch.setattr(loop, "LEAD_S", 1e3)
    wanted = [(prompt, replace(params, max_new_tokens=6)) for prompt, params in requests()[1:7]]
    assert_same(configured(variant, enforce_eager=False, overlap=overlap), wanted, monkeypatch)
    state = STATES[-1]
    assert state.num_captured >= 2
    assert state.num_replayed > state.num_captured
    assert state.capture_error == ""


def test_what_is_idle_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape that was missed is captured while nothing runs, without a request that waits."""
    monkeypatch.setenv("LMI_OPS", CPP)
    params = SamplingParams(max_new_tokens=3, ignore_eos=True)

    async def main() -> None:
        async with Engine(configured(enforce_eager=False)) as engine:
            runner = engine._core._runner  # type: ignore[union-attr]
            assert isinstance(runner, CudaRunner)
            first = await collect(engine, [5, 6], params)
            await until(lambda: runner._steps.list.state().num_captured == 1)
            before = runner._steps.list.state().num_replayed
            again = await collect(engine, [5, 6], params)
            assert [event.token_id for event in again] == [event.token_id for event in first]
            assert runner._steps.list.state().num_replayed == before + 2

    run(main())


def test_a_shape_that_cannot_be_captured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps go on kernel by kernel, and the log says why."""
    shrink_lists(monkeypatch, max_tokens=2, max_seqs=1)
    monkeypatch.setattr(cuda_model, "row_counts", lambda most: [200])
    monkeypatch.setattr(decode_graphs, "NUM_MISSES", 1)
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    assert len(run(outcomes(configured(enforce_eager=False), [((5, 6), params)]))[0]) == 4
    assert "kernel by kernel: capturing them failed: a step's inputs take" in caplog.text
    assert STATES[-1].num_captured == 0


class FakeMemory:
    """Steps take 1 GiB of 80, and so does the first graph; the second takes 4 MiB."""

    total_bytes = 80 << 30

    def __init__(self) -> None:
        self.reserved = [15 << 30, 16 << 30, (16 << 30) + (4 << 20)]

    def free_bytes(self) -> int:
        return 60 << 30

    def reserved_bytes(self) -> int:
        return self.reserved.pop(0)

    def allocated_bytes(self) -> int:
        return 15 << 30

    def start_peak(self) -> None:
        pass

    def peak_bytes(self) -> int:
        return 1 << 30


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_what_is_measured_is_reported(
    enforce_eager: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows 1, 2, 4 and keys 32, 100: six graphs, of which the driver keeps 8 MiB each."""
    monkeypatch.setenv("LMI_OPS", CPP)
    monkeypatch.setattr(cuda_model, "memory_of", lambda device: FakeMemory())
    monkeypatch.setattr(decode_graphs, "FIRST_NUM_KEYS", 32)
    config = configured(enforce_eager=enforce_eager, max_num_seqs=4, max_model_len=100)

    async def main() -> int:
        async with Engine(config, check_integrity=True) as engine:
            assert await collect(engine, [5, 6, 7], SamplingParams(max_new_tokens=2))
            return engine.info.runner.arena_bytes

    with caplog.at_level(logging.INFO):
        assert run(main()) == 1 << 30
    graphs = "0.00" if enforce_eager else "1.07"
    assert f"workspace 1.00 GiB, graphs {graphs} GiB, KV cache 0.00 GiB" in caplog.text
