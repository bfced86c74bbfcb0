"""The engine on the torch runner gives the tokens that it gives on the native one."""

from __future__ import annotations

import asyncio
import importlib
import os
from dataclasses import replace
from pathlib import Path

import pytest

from lmi_core.engine import loop
from lmi_core.engine.engine import Engine
from lmi_core.engine.outputs import TokenEvent
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import EngineError, InsufficientMemoryError, UserError
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.structured.grammar import Grammar
from tests.checkpoints import cached_checkpoint, make_checkpoint
from tests.engine.harness import assert_nothing_leaked, collect, run

torch = pytest.importorskip("torch", exc_type=ImportError)
from tests.runners.device.torch_harness import assert_alike, config_of, outcomes  # noqa: E402


@pytest.mark.parametrize("variant", ["llama3", "mistral", "qwen2", "qwen3"])
def test_same_tokens_as_native(variant: str) -> None:
    model = cached_checkpoint(variant)
    native = run(outcomes(config_of(model, "cpu")))
    torch_events = run(outcomes(config_of(model, "torch-cpu")))
    for events, others in zip(torch_events, native, strict=True):
        assert_alike(events, others)


def test_bf16_serves() -> None:
    """bf16 rounds differently in every engine, so only that tokens and events come is compared."""
    model = cached_checkpoint("llama2", dtype="bfloat16")
    config = config_of(model, "torch-cpu", dtype="auto")
    native = run(outcomes(replace(config, device="cpu")))
    for events, others in zip(run(outcomes(config)), native, strict=True):
        assert len(events) == len(others)
        assert events[0].logprob == pytest.approx(others[0].logprob, abs=0.5)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"quantize": "int4"},
        {"quantize": "fp8"},
        {"kv_dtype": "int8"},
        {"kv_dtype": "fp8_e4m3fn"},
    ],
)
def test_cuda_kernels_serve(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, changes: dict[str, object]
) -> None:
    """The whole engine on the CUDA kernels' sources, in their emulator."""
    from tests.ops.cuda_kernels import use_cuda_kernels

    use_cuda_kernels(torch.device("cpu"), monkeypatch)
    model = cached_checkpoint("llama2", dtype="bfloat16")
    config = config_of(model, "torch-cpu", dtype="auto", **changes)
    fallback = importlib.import_module("lmi_core.ops.kernels.fallback")
    fallback._fallback.cache_clear()  # says it once

    async def generate(kernels: str) -> list[TokenEvent]:
        monkeypatch.setenv("LMI_OPS", kernels)
        params = SamplingParams(max_new_tokens=2, ignore_eos=True, logprobs=2)
        async with Engine(config) as engine:
            assert engine.info.runner.kernels.startswith(f"{kernels}: linear")
            return list(await collect(engine, list(range(30, 52)), params))

    events, others = run(generate("native")), run(generate("torch"))
    assert len(events) == len(others)
    assert events[0].token_id == others[0].token_id
    # A last bit of bf16 can be a sixteenth of an activation that is rounded to fp8.
    tolerance = 0.2 if changes.get("quantize") == "fp8" else 0.05
    assert events[0].logprob == pytest.approx(others[0].logprob, abs=tolerance)
    assert "the CUDA kernel has no" not in caplog.text


def test_what_was_decided() -> None:
    async def look() -> None:
        async with Engine(config_of(cached_checkpoint("llama2"), "torch-cpu")) as engine:
            info = engine.info.runner
        assert info.device == "torch-cpu"
        assert "attention" in info.kernels
        assert info.dtype == info.kv_dtype == "fp32"
        assert info.kv_cache_bytes <= 4 << 20
        assert info.weight_bytes > 0

    run(look())


def test_a_failed_step_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from lmi_core.ops.kernels.torch_ops import attention

    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("out of something")

    async def generate() -> None:
        async with Engine(config_of(cached_checkpoint("llama2"), "torch-cpu")) as engine:
            with pytest.raises(EngineError, match="RuntimeError: out of something"):
                await collect(engine, [5, 6])
            await assert_nothing_leaked(engine)

    monkeypatch.setattr(attention, "attention", fail)
    run(generate())


def test_a_step_without_memory_says_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    from lmi_core.ops.kernels.torch_ops import attention

    def fail(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    async def generate() -> None:
        async with Engine(config_of(cached_checkpoint("llama2"), "torch-cpu")) as engine:
            with pytest.raises(EngineError, match=r"lower gpu_memory_utilization, which is 0.9\)"):
                await collect(engine, [5, 6])

    monkeypatch.setattr(attention, "attention", fail)
    run(generate())


def test_no_gpu_is_a_clear_error() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")

    async def start() -> None:
        async with Engine(config_of(cached_checkpoint("llama2"), "cuda")):
            pass

    with pytest.raises(UserError, match=r"device=cuda, but torch .* finds no GPU: set device=cpu"):
        run(start())


def test_unknown_kernels_are_found_before_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start() -> None:
        async with Engine(config_of(tmp_path, "torch-cpu")):
            pass

    monkeypatch.setenv("LMI_OPS", "attention:magic")
    with pytest.raises(UserError, match="LMI_OPS has 'attention:magic'"):
        run(start())


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="Triton's interpreter wants a process of its own: make test-triton",
)
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("qwen3_window", {}),
        ("qwen3_window", {"quantize": "int8"}),
        ("gpt_oss", {}),
        ("deepseek_v3", {}),
        ("phimoe", {}),
        ("bloom", {}),
        ("phi_norms", {}),
    ],
)
def test_triton_same_tokens_as_native(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, changes: dict[str, str]
) -> None:
    """Grouped queries, norms of heads, a window; sinks, experts by three ways of routing, latents;
    LayerNorm, ALiBi."""
    pytest.importorskip("triton")
    smaller = {}
    if variant == "qwen3_window":
        smaller = {"num_hidden_layers": 1, "max_window_layers": 0}
    elif variant == "deepseek_v3":  # its latent heads have 40 dimensions or so
        module = importlib.import_module("lmi_core.ops.kernels.triton.attention")
        monkeypatch.setattr(module, "MAX_HEAD_DIM", 32)
    model = make_checkpoint(tmp_path / "model", variant, **smaller)
    monkeypatch.setenv("LMI_OPS", "triton")

    async def generate(device: str) -> list[list[TokenEvent]]:
        params = SamplingParams(max_new_tokens=3, ignore_eos=True, logprobs=2)
        config = config_of(model, device, max_num_batched_tokens=16, **changes)
        async with Engine(config) as engine:
            if device == "torch-cpu":
                assert engine.info.runner.kernels.count("triton: ") == 1
            prompts = [[9] * 3, list(range(30, 52))]
            return list(
                await asyncio.gather(*(collect(engine, prompt, params) for prompt in prompts))
            )

    native = run(generate("cpu"))
    for events, others in zip(run(generate("torch-cpu"), 110), native, strict=True):
        assert_alike(events, others)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")
@pytest.mark.parametrize("variant", ["llama3", "mistral", "qwen2", "qwen3"])
def test_gpu_same_tokens_as_native(variant: str) -> None:
    model = cached_checkpoint(variant)
    native = run(outcomes(config_of(model, "cpu")))
    gpu = run(outcomes(config_of(model, "cuda")), timeout_s=110)
    for events, others in zip(gpu, native, strict=True):
        assert_alike(events, others)


def test_weights_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    from lmi_core.models import loader
    from lmi_core.runners.device.device_runner import load_device_runner

    def fill(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(loader, "load_weights", fill)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 24 * 2**30))
    config = config_of(cached_checkpoint("llama2"), "torch-cpu")
    with pytest.raises(InsufficientMemoryError, match=r"of the GPU's 24.0 GiB: set quantize=int4"):
        load_device_runner(config)


COMMON = SamplingParams(max_new_tokens=9, ignore_eos=True)


@pytest.mark.parametrize(
    "params",
    [
        COMMON,
        replace(COMMON, repetition_penalty=1.5, presence_penalty=0.5),
        replace(COMMON, temperature=1.0, seed=3, watermark_delta=8.0, frequency_penalty=1.0),
        replace(COMMON, grammar=Grammar.regex("[a-z ]{40}"), repetition_penalty=1.5),
    ],
    ids=["plain", "penalties", "watermark", "grammar"],
)
def test_steps_run_ahead_of_their_tokens(
    params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of sequences that stay take their token from other rows when some have ended; what
    hangs on that token waits for it, behind the forward pass."""
    from lmi_core.runners.device.torch_runner import TorchRunner

    rows: list[list[int]] = []
    submit_ahead = TorchRunner.submit_ahead

    def count(self: TorchRunner, step: object, logit_rows: list[int]) -> None:
        rows.append(logit_rows)
        submit_ahead(self, step, logit_rows)  # type: ignore[arg-type]

    monkeypatch.setattr(TorchRunner, "submit_ahead", count)
    monkeypatch.setattr(loop, "MAX_AHEAD_S", 1e3)  # whatever else the machine does
    monkeypatch.setattr(loop, "LEAD_S", 1e3)
    config = config_of(cached_checkpoint("llama2"), "torch-cpu")

    async def generate(config: EngineConfig) -> list[list[int]]:
        async with Engine(config, check_integrity=True) as engine:
            await collect(engine, [4], params)  # compiles its grammar
            asked = [([5 + n, 6], replace(params, max_new_tokens=n)) for n in (5, 9, 12)]
            results = await asyncio.gather(*(collect(engine, *each) for each in asked))
        return [[event.token_id for event in events] for events in results]

    ahead = run(generate(config))
    assert [0, 1, 2] in rows
    assert [1, 2] in rows
    num_ahead = len(rows)
    assert ahead == run(generate(replace(config, overlap=False)))
    assert len(rows) == num_ahead
