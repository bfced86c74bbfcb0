"""Captured decode steps give the tokens of steps that run op by op; capturing is a stand-in that
runs the recorded calls again, on the tensors and lengths that they were recorded with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lmi_core.engine.engine import Engine
from lmi_core.engine.outputs import TokenEvent
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.settings.engine_config import EngineConfig
from tests.checkpoints import cached_checkpoint
from tests.engine.harness import assert_nothing_leaked, collect, run

torch = pytest.importorskip("torch", exc_type=ImportError)

from lmi_core.ops.device.decode_step import DecodeStep  # noqa: E402
from lmi_core.ops.device.step_arrays import StepArrays  # noqa: E402
from lmi_core.runners.device import (  # noqa: E402
    decode_graphs,
    torch_runner,
)
from tests.ops.paged_case import PagedCase  # noqa: E402
from tests.runners.device.torch_harness import assert_alike, config_of, outcomes  # noqa: E402


class Rerun:
    """Captures by keeping the function; counts its replays."""

    def __init__(self) -> None:
        self.num_captured = 0
        self.num_replayed = 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        self.num_captured += 1

        def replay() -> None:
            self.num_replayed += 1
            run()

        return replay


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Rerun:
    rerun = Rerun()

    def make(config: EngineConfig, device: object, chosen: Mapping[str, str]) -> Rerun | None:
        return None if config.enforce_eager else rerun

    monkeypatch.setattr(torch_runner, "make_capture", make)
    monkeypatch.setattr(decode_graphs, "NUM_MISSES", 2)
    monkeypatch.setattr(decode_graphs, "FIRST_NUM_KEYS", 32)
    return rerun


@pytest.mark.parametrize("variant", ["llama3", "qwen3_window"])
def test_same_tokens_as_op_by_op(variant: str, capture: Rerun) -> None:
    config = config_of(cached_checkpoint(variant), "torch-cpu")
    captured = run(outcomes(config))
    assert capture.num_captured >= 2
    assert capture.num_replayed > capture.num_captured
    before = capture.num_replayed
    eager = run(outcomes(EngineConfig(**{**_fields(config), "enforce_eager": True})))
    assert capture.num_replayed == before
    for events, others in zip(captured, eager, strict=True):
        assert_alike(events, others)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")
@pytest.mark.parametrize("kernels", ["", "native,launch:torch"])
def test_gpu_same_tokens_as_op_by_op(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of CUDA's, of Triton's kernels and of ours; no reference but the steps themselves."""
    from tests.ops.cuda_kernels import use_cuda_kernels

    if kernels:
        use_cuda_kernels(torch.device("cuda"), monkeypatch)
    monkeypatch.setenv("LMI_OPS", kernels)
    monkeypatch.setattr(decode_graphs, "NUM_MISSES", 2)
    monkeypatch.setattr(decode_graphs, "FIRST_NUM_KEYS", 32)
    replayed: list[bool] = []
    run_graph = decode_graphs.DecodeGraphs.run

    def noted(self: decode_graphs.DecodeGraphs, *arguments: Any) -> Any:
        logits = run_graph(self, *arguments)
        replayed.append(logits is not None)
        return logits

    monkeypatch.setattr(decode_graphs.DecodeGraphs, "run", noted)
    stored = "bfloat16" if kernels else "float32"
    config = config_of(cached_checkpoint("llama3", dtype=stored), "cuda", dtype="auto")
    captured = run(outcomes(config), timeout_s=110)
    assert any(replayed)
    replayed.clear()
    eager = run(outcomes(replace(config, enforce_eager=True)), timeout_s=110)
    assert not replayed
    for events, others in zip(captured, eager, strict=True):
        if not kernels:
            assert_alike(events, others)
            continue
        assert [event.token_id for event in events] == [event.token_id for event in others]
        logprobs = [event.logprob for event in others]
        assert [event.logprob for event in events] == pytest.approx(logprobs, abs=0.02)


def _fields(config: EngineConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in config.__slots__}


def test_native_kernels_get_new_lists(monkeypatch: pytest.MonkeyPatch, capture: Rerun) -> None:
    """Sequences that grow past a split, in the emulator of a device."""
    from tests.ops.cuda_kernels import use_cuda_kernels

    use_cuda_kernels(torch.device("cpu"), monkeypatch)
    monkeypatch.setenv("LMI_OPS", "native,launch:torch")
    config = config_of(cached_checkpoint("llama2", dtype="bfloat16"), "torch-cpu", dtype="auto")

    async def generate(config: EngineConfig) -> list[list[TokenEvent]]:
        params = SamplingParams(max_new_tokens=6, ignore_eos=True)
        async with Engine(config) as engine:
            prompts = [list(range(30, 30 + length)) for length in (3, 30)]
            return list(await asyncio.gather(*(collect(engine, p, params) for p in prompts)))

    captured = run(generate(config))
    assert capture.num_replayed > 2
    for events, others in zip(
        captured,
        run(generate(EngineConfig(**{**_fields(config), "enforce_eager": True}))),
        strict=True,
    ):
        assert [event.token_id for event in events] == [event.token_id for event in others]
        assert events[-1].logprob == pytest.approx(others[-1].logprob, abs=0.02)


@pytest.mark.parametrize("prefills_all", [False, True])
def test_native_lists_are_refreshed_in_place(
    monkeypatch: pytest.MonkeyPatch, prefills_all: bool
) -> None:
    """What a refilled step's lists say is what lists of its own say, and nothing beside."""
    from tests.ops.cuda_kernels import use_cuda_kernels

    use_cuda_kernels(torch.device("cpu"), monkeypatch)
    from lmi_core.ops.device.device_step import DeviceStep
    from lmi_core.ops.kernels.cuda.attention_lists import list_attention

    shape = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "window": 0}
    shape["prefills_all"] = prefills_all
    inputs = make_inputs(num_rows=3, num_keys=4096)
    lists = list_attention(inputs.step, **shape)
    place = lists.decode.data_ptr(), lists.prefill.data_ptr()
    for lengths in ((4096, 4096, 4096), (1, 700, 4000), (5, 5)):
        arrays = PagedCase(tuple((length - 1, 1) for length in lengths), 4, 2, 16).arrays()
        inputs.fill(arrays)
        assert list_attention(inputs.step, **shape) is lists
        assert (lists.decode.data_ptr(), lists.prefill.data_ptr()) == place
        padded = (*lengths, 1)[:3]
        own = PagedCase(tuple((length - 1, 1) for length in padded), 4, 2, 16).arrays()
        expected = list_attention(
            DeviceStep.upload(own, block_size=16, device=torch.device("cpu")), **shape
        )
        work = lists.decode[lists.decode[:, 1] < lists.decode[:, 2]]
        assert work.tolist() == expected.decode.tolist()
        assert lists.prefill.tolist() == expected.prefill.tolist()
        assert prefills_all or work[:, 3].max() < lists.num_partials


def make_inputs(num_rows: int, num_keys: int) -> DecodeStep:
    return DecodeStep(
        num_rows, num_keys, block_size=16, scratch_block=99, device=torch.device("cpu")
    )


def test_free_rows_point_to_the_scratch_block() -> None:
    inputs = make_inputs(num_rows=5, num_keys=64)
    arrays = PagedCase(((20, 1), (3, 1)), 1, 1, 8).arrays()
    inputs.fill(arrays)
    step = inputs.step
    assert step.slots[2:].tolist() == [99 * 16] * 3
    assert step.kv_lengths.tolist() == [21, 4, 1, 1, 1]
    assert step.positions.tolist() == [20, 3, 0, 0, 0]
    assert step.block_tables[:2, :2].tolist() == arrays.block_tables.tolist()
    assert set(step.block_tables[2:].flatten().tolist()) == {99}
    assert all(view.data_ptr() % 16 == 0 for view in (step.token_ids, step.block_tables))
    inputs.clear()
    assert step.kv_lengths.tolist() == [1] * 5


def test_a_failed_capture_leaves_steps_op_by_op(caplog: pytest.LogCaptureFixture) -> None:
    def fail(run: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs = make_graphs(fail)
    arrays = decode_arrays(2)
    for _ in range(decode_graphs.NUM_MISSES + 2):
        assert graphs.run(arrays) is None
    assert not graphs.has_wanted
    assert caplog.text.count("capturing them failed: operation not permitted") == 1


def test_what_is_captured() -> None:
    """Shapes that were missed, once each; steps with prompts or copies never."""
    capture = Rerun()
    graphs = make_graphs(capture)
    for num_rows in (1, 3, 4):
        assert graphs.run(decode_arrays(num_rows)) is None
    while graphs.has_wanted:
        graphs.capture_wanted()
    assert graphs.num_captured == 2
    logits = graphs.run(decode_arrays(3))
    assert logits is not None
    assert logits.shape == (3, 7)
    prompt = PagedCase(((0, 3), (4, 1)), 1, 1, 8).arrays()
    assert graphs.run(prompt) is None
    assert not graphs.has_wanted


def make_graphs(capture: decode_graphs.Capture) -> decode_graphs.DecodeGraphs:
    return decode_graphs.DecodeGraphs(
        lambda step: torch.zeros(len(step.token_ids), 7),
        capture,
        max_num_seqs=6,
        max_model_len=64,
        vocab_size=7,
        block_size=16,
        scratch_block=99,
        device=torch.device("cpu"),
    )


def decode_arrays(num_rows: int) -> StepArrays:
    arrays = PagedCase(((5, 1),) * num_rows, 1, 1, 8).arrays()
    return replace(arrays, logit_token_rows=np.arange(num_rows, dtype=np.int32))


def test_shapes() -> None:
    assert decode_graphs.row_counts(1) == [1]
    assert decode_graphs.row_counts(40) == [1, 2, 4, 8, 16, 24, 32, 40]
    assert decode_graphs.row_counts(150)[-4:] == [64, 96, 128, 150]
    assert decode_graphs.key_counts(160) == [160]
    assert decode_graphs.key_counts(5000) == [1024, 4096, 5000]


def test_nothing_leaks(capture: Rerun) -> None:
    async def generate() -> None:
        config = config_of(cached_checkpoint("llama2"), "torch-cpu")
        async with Engine(config, check_integrity=True) as engine:
            await collect(engine, [5, 6], SamplingParams(max_new_tokens=8, ignore_eos=True))
            await assert_nothing_leaked(engine)

    run(generate())
    assert capture.num_captured
