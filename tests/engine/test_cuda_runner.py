"""Steps that C++ launches give, to the bit, what the same kernels give launched from Python: on a
GPU, or in the emulator of one."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmi_core import _native
from lmi_core.config.engine_config import EngineConfig
from lmi_core.engine import loop
from lmi_core.engine.engine import Engine
from lmi_core.engine.outputs import TokenEvent
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.engine.stats import EngineTotals
from lmi_core.errors import EngineError
from lmi_core.structured.grammar import Grammar
from tests.checkpoints import cached_checkpoint, make_checkpoint
from tests.engine.harness import assert_nothing_leaked, collect, run, until

torch = pytest.importorskip("torch", exc_type=ImportError)

from lmi_core.engine import cuda_runner, decode_graphs, torch_runner  # noqa: E402
from lmi_core.engine.cuda_runner import CudaRunner  # noqa: E402
from lmi_core.ops import packed_weight  # noqa: E402
from lmi_core.ops.cuda import cublaslt, library  # noqa: E402
from lmi_core.ops.cuda.step_list import StepListSizes, StepListState  # noqa: E402
from tests.engine.torch_harness import config_of, requests  # noqa: E402
from tests.ops.cuda_kernels import use_cuda_kernels  # noqa: E402
from tests.ops.device_ops import DEVICES  # noqa: E402

CPP, PYTHON = "native", "native,launch:torch"
Request = tuple[tuple[int, ...], SamplingParams]
CONFIG = SimpleNamespace(device="torch-cpu")
"""Where the present test runs."""
STATES: list[StepListState] = []
"""Of the step lists that were closed."""
TOTALS: list[EngineTotals] = []
"""Of the engines that were stopped."""


@pytest.fixture(autouse=True, params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    torch.set_num_threads(1)
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
    monkeypatch.setenv("LMI_OPS", PYTHON)
    expected = run(outcomes(config, wanted), 110)
    monkeypatch.setenv("LMI_OPS", CPP)
    results = run(outcomes(config, wanted), 110)
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


@pytest.mark.parametrize("variant", ["llama2", "qwen3_window", "qwen2"])
def test_same_bits_as_launched_from_python(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunked prompts with a common prefix, penalties, bans, filters, choices, prompt
    log-probabilities; waiting for free rows."""
    wanted = [(prompt, replace(params, max_new_tokens=4)) for prompt, params in requests()]
    assert_same(configured(variant, overlap=False), wanted, monkeypatch)


def test_the_runner_says_who_launches(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def kernels(**changes: object) -> str:
        async with Engine(configured(**changes)) as engine:
            return engine.info.runner.kernels

    monkeypatch.setenv("LMI_OPS", CPP)
    assert run(kernels()).endswith(", launch")
    assert "launched from Python" not in caplog.text
    assert "launch" not in run(kernels(dtype="fp32"))
    assert "op by op, because of linear: the CUDA kernel has no float32 rows" in caplog.text
    monkeypatch.setenv("LMI_OPS", "native,rms_norm:torch")
    assert "launch" not in run(kernels())
    assert "because of rms_norm: it runs in torch" in caplog.text
    caplog.clear()
    monkeypatch.setenv("LMI_OPS", PYTHON)
    assert "launch" not in run(kernels())
    assert "launched from Python" not in caplog.text


@pytest.mark.parametrize("quantize", ["int8", "int4", "fp8"])
def test_quantized_weights(quantize: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_new_tokens=3, ignore_eos=True, logprobs=2)
    wanted = [(prompt, params) for prompt in prompts(3, 20)]
    assert_same(configured(quantize=quantize, overlap=False), wanted, monkeypatch)


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


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8_e4m3fn"])
def test_caches_of_8_bits(kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second choice shares the prompt's blocks, and copies the last one."""
    params = SamplingParams(max_new_tokens=3, ignore_eos=True, temperature=1.0, n=2, seed=3)
    wanted = [(prompt, params) for prompt in prompts(3, 20)]
    assert_same(configured(kv_dtype=kv_dtype, overlap=False), wanted, monkeypatch)


def test_long_contexts_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_new_tokens=3, ignore_eos=True, logprobs=2)
    wanted = [(prompt, params) for prompt in prompts(340, 5)]
    config = configured(
        overlap=False, max_model_len=400, max_num_batched_tokens=384, kv_cache_bytes=8 << 20
    )
    assert_same(config, wanted, monkeypatch)


def test_preempted_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    block_bytes = 2 * 3 * 16 * 2 * 16 * 2  # keys, values; layers, tokens, heads, head size, bf16
    config = configured(overlap=False, max_model_len=48, kv_cache_bytes=5 * block_bytes)
    params = SamplingParams(max_new_tokens=22, ignore_eos=True, logprobs=0)
    wanted = [(prompt, params) for prompt in prompts(12, 13, 14)]
    assert_same(config, wanted, monkeypatch)
    assert TOTALS[-1].num_preemptions > 0


def test_steps_run_ahead_of_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens go from step to step on the device, also to other rows when some have ended."""
    rows: list[list[int]] = []
    submit_ahead = CudaRunner.submit_ahead

    def count(self: CudaRunner, step: _native.Step, logit_rows: list[int]) -> None:
        rows.append(logit_rows)
        submit_ahead(self, step, logit_rows)

    monkeypatch.setattr(CudaRunner, "submit_ahead", count)
    monkeypatch.setattr(loop, "MAX_AHEAD_S", 1e3)  # the emulator takes its time
    common = SamplingParams(ignore_eos=True, temperature=0.7, seed=5, logprobs=1)
    wanted = [
        (prompt, replace(common, max_new_tokens=count))
        for prompt, count in zip(prompts(2, 2, 2), (3, 7, 9), strict=True)
    ]
    ahead = assert_same(configured(), wanted, monkeypatch)
    assert [0, 1, 2] in rows
    assert [1, 2] in rows
    num_ahead = len(rows)
    assert_alike(ahead, run(outcomes(configured(overlap=False), wanted), 110))
    assert len(rows) == num_ahead


def test_masks_of_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance")
    pattern = "[a-f]{3}(-[0-9]{2}){2}"
    rules = SamplingParams(grammar=Grammar.regex(pattern), temperature=1.5, max_new_tokens=30)
    wanted = [((40,), replace(rules, seed=seed)) for seed in range(2)]
    wanted.append(((41,), SamplingParams(max_new_tokens=4, ignore_eos=True)))
    results = assert_same(configured(overlap=False), wanted, monkeypatch)
    for events in results[:2]:
        assert re.fullmatch(pattern, "".join(event.text for event in events))


class Rerun:
    """Captures by keeping the function, as a stand-in for ``CudaCapture``."""

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run


@pytest.mark.parametrize("overlap", [False, True])
def test_captured_decode_steps(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded to the same shapes from the first step on, both launchers give the same bits."""
    monkeypatch.setattr(torch_runner, "make_capture", lambda *_: Rerun())
    monkeypatch.setattr(decode_graphs, "NUM_MISSES", 1)
    monkeypatch.setattr(decode_graphs, "FIRST_NUM_KEYS", 32)
    monkeypatch.setattr(loop, "MAX_AHEAD_S", 1e3)
    wanted = [(prompt, replace(params, max_new_tokens=6)) for prompt, params in requests()[1:7]]
    assert_same(configured(enforce_eager=False, overlap=overlap), wanted, monkeypatch)
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
    monkeypatch.setattr(cuda_runner, "row_counts", lambda most: [200])
    monkeypatch.setattr(decode_graphs, "NUM_MISSES", 1)
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    assert len(run(outcomes(configured(enforce_eager=False), [((5, 6), params)]))[0]) == 4
    assert "kernel by kernel: capturing them failed: a step's inputs take" in caplog.text
    assert STATES[-1].num_captured == 0


def test_a_failed_step_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_lists(monkeypatch, max_tokens=16)
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)

    async def main() -> None:
        async with Engine(configured(), check_integrity=True) as engine:
            before = await collect(engine, [5, 6], params)
            with pytest.raises(EngineError, match="a step of 20 tokens, 1 sequences"):
                await collect(engine, list(range(9, 29)), params)
            after = await collect(engine, [5, 6], params)
            assert [e.token_id for e in after] == [e.token_id for e in before]
            assert engine.healthy
            await assert_nothing_leaked(engine)

    run(main())


def shrink_lists(monkeypatch: pytest.MonkeyPatch, **sizes: int) -> None:
    """Launched from C++, by lists for smaller steps than there will be."""

    def shrunk(**wanted: Any) -> StepListSizes:
        return StepListSizes(**{**wanted, **sizes})

    monkeypatch.setenv("LMI_OPS", CPP)
    monkeypatch.setattr(cuda_runner, "StepListSizes", shrunk)


def test_shapes_that_cublaslt_has_no_algorithm_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The stand-in of cuBLASLt has none for so many inputs without a workspace."""
    if CONFIG.device == "cuda":
        pytest.skip("the library itself has an algorithm")
    monkeypatch.setattr(cublaslt, "WORKSPACE_BYTES", 256)
    model = make_checkpoint(
        tmp_path / "model",
        "llama2",
        dtype="bfloat16",
        num_hidden_layers=1,
        intermediate_size=1008,
    )
    config = replace(configured(overlap=False), model=model)
    params = SamplingParams(max_new_tokens=3, ignore_eos=True, logprobs=2)
    assert_same(config, [(prompt, params) for prompt in prompts(3, 20)], monkeypatch)
    assert "1008 inputs" in caplog.text
    assert "run in a plain kernel" in caplog.text


def test_notices_of_steps_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What the kernels have to say of a shape may come up in any step."""
    if CONFIG.device == "cuda":
        pytest.skip("the library itself has an algorithm")
    monkeypatch.setenv("LMI_OPS", CPP)
    x, weight = torch.zeros(9, 1064).bfloat16(), torch.zeros(4, 1064).bfloat16()

    async def main() -> None:
        async with Engine(configured(), check_integrity=True) as engine:
            library.call(
                "linear_dense",
                x,
                x=x,
                weight=weight,
                y=torch.empty(9, 4),
                num_rows=9,
                num_outputs=4,
                num_inputs=1064,
                y_stride=4,
                dtype=x.dtype,
            )
            assert "1064 inputs" not in caplog.text
            await collect(engine, [5, 6], SamplingParams(max_new_tokens=2, ignore_eos=True))
            assert "products of 9 rows, 1064 inputs and 4 outputs run in a plain" in caplog.text

    run(main())


class FakeMemory:
    """Steps take 1 GiB of 80, and so does the first graph; the second takes 8 MiB."""

    total_bytes = 80 << 30

    def __init__(self) -> None:
        self.free = [60 << 30, 59 << 30, (59 << 30) - (8 << 20), 60 << 30]

    def free_bytes(self) -> int:
        return self.free.pop(0)

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
    """Rows 1, 2, 4 and keys 32, 100: six graphs."""
    monkeypatch.setenv("LMI_OPS", CPP)
    monkeypatch.setattr(cuda_runner, "memory_of", lambda device: FakeMemory())
    monkeypatch.setattr(decode_graphs, "FIRST_NUM_KEYS", 32)
    config = configured(enforce_eager=enforce_eager, max_num_seqs=4, max_model_len=100)

    async def main() -> int:
        async with Engine(config, check_integrity=True) as engine:
            assert await collect(engine, [5, 6, 7], SamplingParams(max_new_tokens=2))
            return engine.info.runner.arena_bytes

    with caplog.at_level(logging.INFO):
        assert run(main()) == 1 << 30
    graphs = "0.00" if enforce_eager else "1.04"
    assert f"workspace 1.00 GiB, graphs {graphs} GiB, KV cache 0.00 GiB" in caplog.text


def test_closing_while_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMI_OPS", CPP)
    monkeypatch.setattr(loop, "MAX_AHEAD_S", 1e3)
    params = SamplingParams(max_new_tokens=100, ignore_eos=True)

    async def main() -> None:
        async with Engine(configured(enforce_eager=False)) as engine:
            tasks = [asyncio.create_task(collect(engine, [5, i], params)) for i in range(3)]
            await until(lambda: engine.stats().totals.num_generated_tokens > 4)
            await engine.stop(drain=False)
            await asyncio.gather(*tasks, return_exceptions=True)

    run(main())
    assert STATES
