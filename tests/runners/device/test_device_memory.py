"""A GPU's memory is measured, divided as configured, and refused with values that would work; the
device is a scripted one, the steps that are measured are real."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from lmi_core.engine.engine import Engine
from lmi_core.errors import InsufficientMemoryError
from lmi_core.runners.runner import RunnerInfo
from lmi_core.settings.engine_config import EngineConfig
from tests.checkpoints import cached_checkpoint
from tests.engine.harness import collect, run

torch = pytest.importorskip("torch", exc_type=ImportError)

from lmi_core.ops.device.eager import EagerGraph  # noqa: E402
from lmi_core.runners.device import (  # noqa: E402
    decode_graphs,
    device_runner,
    torch_runner,
)
from lmi_core.runners.device.device_memory import MeasuredMemory  # noqa: E402
from lmi_core.runners.device.widest_step import widest_arrays  # noqa: E402
from lmi_core.runners.step_memory import StepSizes  # noqa: E402
from tests.runners.device.torch_harness import config_of  # noqa: E402

GIB = 2**30
MIB = 2**20


class FakeMemory:
    """80 GiB, of which other processes take more all the time; every graph takes 4 MiB, the first
    1 GiB, and steps take 3 GiB."""

    total_bytes = 80 * GIB

    def __init__(self) -> None:
        self.reserved = 15 * GIB
        self.num_graphs = 0
        self.allocated = [2 * GIB, 15 * GIB]

    def free_bytes(self) -> int:
        return 60 * GIB - self.num_graphs * 7 * MIB

    def reserved_bytes(self) -> int:
        return self.reserved

    def allocated_bytes(self) -> int:
        return self.allocated.pop(0)

    def start_peak(self) -> None:
        pass

    def peak_bytes(self) -> int:
        return 3 * GIB

    def capture(self, run: object) -> object:
        run()  # type: ignore[operator]
        self.reserved += 4 * MIB if self.num_graphs else GIB
        self.num_graphs += 1
        return run


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> FakeMemory:
    fake = FakeMemory()
    for module in (device_runner, torch_runner):
        monkeypatch.setattr(module, "memory_of", lambda device: fake)
    monkeypatch.setattr(
        torch_runner,
        "make_capture",
        lambda config, device, chosen: None if config.enforce_eager else fake.capture,
    )
    monkeypatch.setattr(decode_graphs, "FIRST_NUM_KEYS", 32)
    return fake


def gpu_config(**changes: object) -> EngineConfig:
    config = config_of(cached_checkpoint("llama2"), "torch-cpu")
    return replace(config, **{"max_num_seqs": 4, "max_model_len": 100, **changes})


async def serve(config: EngineConfig) -> RunnerInfo:
    async with Engine(config, check_integrity=True) as engine:
        assert await collect(engine, [5, 6, 7])
        return engine.info.runner


def test_what_is_measured_is_reported(memory: FakeMemory, caplog: pytest.LogCaptureFixture) -> None:
    """Rows 1, 2, 4 and keys 32, 100: six graphs, of which the driver keeps 8 MiB each."""
    with caplog.at_level(logging.INFO):
        info = run(serve(gpu_config(kv_cache_bytes=8 * MIB)))
    assert info.arena_bytes == 3 * GIB
    assert memory.num_graphs >= 2
    assert (
        "device memory: weights 13.00 GiB, workspace 3.00 GiB, graphs 1.07 GiB, KV cache 0.01 GiB"
    ) in caplog.text
    assert "(kv_cache_bytes)" in caplog.text


def test_without_graphs(memory: FakeMemory, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        run(serve(gpu_config(kv_cache_bytes=MIB, enforce_eager=True)))
    assert memory.num_graphs == 0
    assert "workspace 3.00 GiB, graphs 0.00 GiB" in caplog.text


def measured(utilization: float = 0.9, **changes: int) -> MeasuredMemory:
    sizes = {"workspace_bytes": 3 * GIB, "graph_bytes": GIB, "free_bytes": 60 * GIB, **changes}
    kept_bytes = round(80 * GIB * (1 - utilization))
    return MeasuredMemory(
        weight_bytes=15 * GIB, total_bytes=80 * GIB, kept_bytes=kept_bytes, **sizes
    )


def test_the_share_of_others_is_of_all_memory() -> None:
    assert measured().spare_bytes == 48 * GIB
    assert measured(0.5).spare_bytes == 16 * GIB
    assert measured(0.5, free_bytes=30 * GIB).spare_bytes == 0
    assert "60.0 GiB free on the GPU after the weights, less 4.0 GiB" in measured().reason
    assert "8.0 GiB left to others" in measured().reason


def check(memory: MeasuredMemory, config: EngineConfig, block_bytes: int) -> str:
    """The refusal's message, empty if there is none."""
    try:
        memory.check(config, max_model_len=config.max_model_len or 0, block_bytes=block_bytes)
    except InsufficientMemoryError as error:
        return str(error)
    return ""


def test_a_context_that_does_not_fit_names_what_would() -> None:
    """A block is 16 tokens and 1 GiB: 100 tokens want 7 blocks, and one for no one."""
    config = gpu_config(kv_cache_bytes=None)
    assert check(measured(0.4), config, GIB) == ""
    message = check(measured(0.35), config, GIB)
    assert "max_model_len=100 needs a KV cache of 8.00 GiB, but 4.00 GiB are left" in message
    assert "set gpu_memory_utilization to at least 0.40 or max_model_len to at most 48" in message
    assert check(measured(0.40), config, GIB) == ""
    assert check(measured(0.35), replace(config, max_model_len=48), GIB) == ""

    full = measured(0.9, free_bytes=5 * GIB)
    assert check(full, config, GIB).endswith("set quantize=int4")
    assert check(full, replace(config, quantize="int4"), GIB).endswith("set a larger GPU")


def test_a_cache_that_is_larger_than_the_device() -> None:
    assert check(measured(), gpu_config(kv_cache_bytes=56 * GIB), GIB) == ""
    message = check(measured(), gpu_config(kv_cache_bytes=56 * GIB + 1), GIB)
    assert message.endswith(f"set it to at most {56 * GIB}")
    assert f"to at most {50 * GIB * 9 // 10}" in str(measured().no_room(50 * GIB))


@pytest.mark.parametrize(
    ("degree", "tried", "advice"),
    [(1, [64, 32, 16], "set max_num_batched_tokens to at most 16"), (2, [64], "lower max_num")],
)
def test_a_step_that_does_not_fit_names_one_that_does(
    degree: int,
    tried: list[int],
    advice: str,
    memory: FakeMemory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of ranks none tries another one: the others don't know of it."""
    widths = []
    forward = EagerGraph.forward

    def limited(self: EagerGraph, step: object) -> object:
        widths.append(len(step.token_ids))  # type: ignore[attr-defined]
        if widths[-1] > 20:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, step)  # type: ignore[arg-type]

    monkeypatch.setattr(EagerGraph, "forward", limited)
    config = gpu_config(
        max_num_batched_tokens=64, enforce_eager=True, tensor_parallel_degree=degree
    )
    with pytest.raises(InsufficientMemoryError, match=advice):
        run(serve(config))
    assert widths == tried


def test_the_widest_step_fills_the_capacities(
    memory: FakeMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More tokens than a sequence has positions, every sequence at its longest."""
    steps = []
    forward = EagerGraph.forward

    def watch(self: EagerGraph, step: object) -> object:
        steps.append(step.host)  # type: ignore[attr-defined]
        return forward(self, step)  # type: ignore[arg-type]

    monkeypatch.setattr(EagerGraph, "forward", watch)
    run(serve(gpu_config(max_num_batched_tokens=150, max_num_seqs=3, enforce_eager=True)))
    widest = steps[0]
    assert widest.num_rows.tolist() == [100, 49, 1]
    assert widest.kv_lengths.tolist() == [100, 100, 100]
    assert len(widest.logit_token_rows) == 256
    assert max(widest.positions) == 99


def test_prefills_at_the_longest_context_only_where_it_takes_memory() -> None:
    sizes = StepSizes(
        vocab_size=9,
        max_model_len=100,
        max_num_tokens=53,
        max_logit_rows=4,
        max_logprobs=0,
        max_blocks_per_seq=7,
    )
    arrays = widest_arrays(53, sizes, max_num_seqs=4, block_size=16, has_long_prefills=False)
    assert arrays.num_rows.tolist() == [50, 1, 1, 1]
    assert arrays.kv_lengths.tolist() == [50, 100, 100, 100]
    assert arrays.positions.tolist() == [*range(50), 99, 99, 99]
    assert max(arrays.slots) < 16
