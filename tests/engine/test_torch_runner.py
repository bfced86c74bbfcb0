"""The engine on the torch runner gives the tokens that it gives on the native one."""

from __future__ import annotations

import asyncio
import importlib
import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lmi_core.config.engine_config import EngineConfig
from lmi_core.engine import loop
from lmi_core.engine.engine import Engine
from lmi_core.engine.outputs import TokenEvent
from lmi_core.engine.runner import RunnerInfo
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import EngineError, InsufficientMemoryError, UserError
from tests.checkpoints import VOCAB_SIZE, cached_checkpoint, make_checkpoint
from tests.engine.harness import assert_nothing_leaked, collect, run
from tests.fp8_checkpoints import make_fp8_checkpoint

torch = pytest.importorskip("torch", exc_type=ImportError)

LOGPROB_TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def config_of(model: Path, device: str, **changes: object) -> EngineConfig:
    settings = {
        "model": model,
        "device": device,
        "dtype": "fp32",
        "max_model_len": 160,
        "block_size": 16,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 48,
        "kv_cache_bytes": 4 << 20,
        "num_threads": 1,
        **changes,
    }
    return EngineConfig(**settings)  # type: ignore[arg-type]


def requests() -> list[tuple[tuple[int, ...], SamplingParams]]:
    """Greedy and sampled, some with a common prefix. Filtered draws agree in distribution only (see
    the sampler's tests), so filters here leave one token."""
    rng = random.Random(7)
    common = SamplingParams(max_new_tokens=8, ignore_eos=True, logprobs=3)
    rules = [
        {},
        {"temperature": 0.8, "seed": 11},
        {"temperature": 1.2, "top_k": 1, "seed": 12},
        {"temperature": 1.0, "top_p": 1e-6, "seed": 13},
        {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 1.0, "seed": 14},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
        {"logit_bias": ((5, 3.0), (9, -2.0)), "banned_token_ids": (7, 8), "min_new_tokens": 4},
        {"prompt_logprobs": 2, "logprobs": 0},
        {"temperature": 1.0, "n": 2, "seed": 15},
    ]
    prefix = tuple(rng.randrange(4, VOCAB_SIZE) for _ in range(40))
    result = []
    for number, rule in enumerate(rules):
        length = rng.choice([1, 15, 16, 17, 60])
        prompt = tuple(rng.randrange(4, VOCAB_SIZE) for _ in range(length))
        if number % 3 == 0:
            prompt = prefix + prompt[:9]
        result.append((prompt, replace(common, **rule)))  # type: ignore[arg-type]
    return result


async def outcomes(config: EngineConfig) -> list[list[TokenEvent]]:
    async with Engine(config, check_integrity=True) as engine:

        async def one(prompt: tuple[int, ...], params: SamplingParams) -> list[TokenEvent]:
            events = [event async for event in engine.generate(prompt, params)]
            return sorted(events, key=lambda event: event.choice)

        results = await asyncio.gather(*(one(*request) for request in requests()))
        await assert_nothing_leaked(engine)
    return results


def assert_alike(events: list[TokenEvent], others: list[TokenEvent]) -> None:
    assert [e.token_id for e in events] == [e.token_id for e in others]
    assert [e.text for e in events] == [e.text for e in others]
    for event, other in zip(events, others, strict=True):
        assert event.logprob == pytest.approx(other.logprob, abs=LOGPROB_TOLERANCE)
        assert [top.token_id for top in event.top] == [top.token_id for top in other.top]
        assert [top.logprob for top in event.top] == pytest.approx(
            [top.logprob for top in other.top], abs=LOGPROB_TOLERANCE
        )
        assert (event.prompt is None) == (other.prompt is None)
        if event.prompt is not None and other.prompt is not None:
            assert [p.logprob for p in event.prompt] == pytest.approx(
                [p.logprob for p in other.prompt], abs=LOGPROB_TOLERANCE
            )


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
    fallback = importlib.import_module("lmi_core.ops.cuda.fallback")
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


@pytest.mark.parametrize("kernels", ["torch", "triton", "native"])
def test_an_int8_cache_serves(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    """As the CPU engine's, with a prefix from the cache."""
    if kernels == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton's interpreter wants a process of its own: make test-triton")
    if kernels == "native":
        from tests.ops.cuda_kernels import use_cuda_kernels

        use_cuda_kernels(torch.device("cpu"), monkeypatch)
    monkeypatch.setenv("LMI_OPS", f"rope_cache_write:{kernels},attention:{kernels}")
    settings = {"kv_dtype": "int8", "max_num_batched_tokens": 16}
    config = config_of(cached_checkpoint("llama2"), "torch-cpu", **settings)

    async def generate(config: EngineConfig) -> tuple[list[TokenEvent], RunnerInfo]:
        params = SamplingParams(max_new_tokens=2, ignore_eos=True, logprobs=2)
        async with Engine(config, check_integrity=True) as engine:
            await collect(engine, list(range(30, 52)), params)
            return list(await collect(engine, list(range(30, 50)), params)), engine.info.runner

    events, info = run(generate(config), 110)
    others, native = run(generate(replace(config, device="cpu")))
    assert (info.kv_dtype, info.kv_cache_bytes) == ("int8", native.kv_cache_bytes)
    assert [event.token_id for event in events] == [event.token_id for event in others]
    for event, other in zip(events, others, strict=True):
        assert event.logprob == pytest.approx(other.logprob, abs=5e-3)


@pytest.fixture
def scaled(tmp_path: Path) -> Path:
    """A checkpoint with scales for an fp8 cache, which are no powers of two."""
    safetensors = pytest.importorskip("safetensors.torch")
    path = make_checkpoint(tmp_path / "model", "llama2")
    tensors = safetensors.load_file(path / "model.safetensors")
    for layer in range(3):
        prefix = f"model.layers.{layer}.self_attn."
        tensors[prefix + "k_scale"] = torch.tensor(0.03 + 0.01 * layer)
        tensors[prefix + "v_scale"] = torch.tensor([0.3])
    safetensors.save_file(tensors, path / "model.safetensors")
    return path


async def scored(config: EngineConfig) -> tuple[list[float], RunnerInfo]:
    """Log-probabilities of a prompt's tokens, the second half after a prefix from the cache."""
    random = np.random.default_rng(5)
    prompt = random.integers(4, VOCAB_SIZE, 60).tolist()
    params = SamplingParams(max_new_tokens=3, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    async with Engine(config, check_integrity=True) as engine:
        events = await collect(engine, prompt, params)
        tokens = [token.logprob for token in events[0].prompt or () if token.logprob is not None]
        again = await collect(engine, [*prompt, 7], replace(params, prompt_logprobs=None))
        assert engine.stats().totals.num_cached_tokens > 0
        drawn = [event.logprob or 0.0 for event in (*events, *again)]
        return tokens + drawn, engine.info.runner


@pytest.mark.parametrize("kernels", ["torch", "triton", "native"])
@pytest.mark.parametrize(("kv_dtype", "error"), [("fp8_e4m3fn", 0.05), ("fp8_e5m2", 0.1)])
def test_an_fp8_cache_serves(
    monkeypatch: pytest.MonkeyPatch, scaled: Path, kernels: str, kv_dtype: str, error: float
) -> None:
    """It costs little, whatever computes it."""
    if kernels == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton's interpreter wants a process of its own: make test-triton")
    if kernels == "native":
        from tests.ops.cuda_kernels import use_cuda_kernels

        use_cuda_kernels(torch.device("cpu"), monkeypatch)
    exact, info = run(scored(config_of(scaled, "torch-cpu")))
    config = config_of(scaled, "torch-cpu", kv_dtype=kv_dtype)
    reference, _ = run(scored(config))
    monkeypatch.setenv("LMI_OPS", f"rope_cache_write:{kernels},attention:{kernels}")
    got, stored = run(scored(config), 110)
    assert stored.kv_dtype == kv_dtype
    assert stored.num_blocks // 4 == info.num_blocks
    assert got == pytest.approx(reference, abs=0.02)
    cost = np.abs(np.array(got) - exact)
    assert 0 < cost.mean() < error


def test_an_fp8_cache_takes_the_scales_of_the_checkpoint(scaled: Path) -> None:
    """With scales so small that every code saturates, something else comes out."""
    from lmi_core.models.loader import load_model

    assert load_model(scaled).kv_scales[1] == pytest.approx((0.04, 0.3))
    config = config_of(scaled, "torch-cpu", kv_dtype="fp8_e4m3fn")
    exact, _ = run(scored(replace(config, kv_dtype="fp32")))
    fine, _ = run(scored(config))
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = safetensors.load_file(scaled / "model.safetensors")
    small = {name: t / 1e4 if name.endswith("_scale") else t for name, t in tensors.items()}
    safetensors.save_file(small, scaled / "model.safetensors")
    coarse, _ = run(scored(config))
    assert np.abs(np.array(coarse) - exact).mean() > 5 * np.abs(np.array(fine) - exact).mean()
    assert run(scored(replace(config, kv_dtype="fp32")))[0] == exact


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3fn", "fp8_e5m2"])
def test_the_cpu_engine_has_no_fp8_cache(kv_dtype: str) -> None:
    async def start() -> None:
        async with Engine(config_of(cached_checkpoint("llama2"), "cpu", kv_dtype=kv_dtype)):
            pass

    with pytest.raises(UserError, match=f"{kv_dtype} needs a GPU: write int8 or bf16, or set"):
        run(start())


def test_a_failed_step_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from lmi_core.ops import torch_ops

    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("out of something")

    async def generate() -> None:
        async with Engine(config_of(cached_checkpoint("llama2"), "torch-cpu")) as engine:
            with pytest.raises(EngineError, match="RuntimeError: out of something"):
                await collect(engine, [5, 6])
            await assert_nothing_leaked(engine)

    monkeypatch.setattr(torch_ops, "attention", fail)
    run(generate())


def test_a_step_without_memory_says_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    from lmi_core.ops import torch_ops

    def fail(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    async def generate() -> None:
        async with Engine(config_of(cached_checkpoint("llama2"), "torch-cpu")) as engine:
            with pytest.raises(EngineError, match=r"lower gpu_memory_utilization, which is 0.9\)"):
                await collect(engine, [5, 6])

    monkeypatch.setattr(torch_ops, "attention", fail)
    run(generate())


def test_no_gpu_is_a_clear_error() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")

    async def start() -> None:
        async with Engine(config_of(cached_checkpoint("llama2"), "cuda")):
            pass

    with pytest.raises(UserError, match=r"device=cuda, but torch .* finds no GPU: set device=cpu"):
        run(start())


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantized_weights_serve(quantize: str) -> None:
    """The same weights as the CPU engine's, whose activations are rounded too."""
    config = config_of(cached_checkpoint("llama2"), "torch-cpu", quantize=quantize)

    async def generate(config: EngineConfig) -> tuple[list[TokenEvent], RunnerInfo]:
        params = SamplingParams(max_new_tokens=4, ignore_eos=True, logprobs=2)
        async with Engine(config) as engine:
            events = await collect(engine, list(range(30, 52)), params)
            return list(events), engine.info.runner

    events, info = run(generate(config))
    others, native = run(generate(replace(config, device="cpu")))
    assert info.quantize == native.quantize == quantize
    assert "linear_packed" in info.kernels
    assert info.weight_bytes == pytest.approx(native.weight_bytes, rel=0.1)
    assert len(events) == len(others)
    assert events[0].logprob == pytest.approx(others[0].logprob, abs=0.05)


@pytest.mark.parametrize("form", ["row", "block"])
def test_fp8_checkpoints_serve(tmp_path: Path, form: str) -> None:
    """As the CPU engine, which has the same weights in bf16, but for the activations' rounding."""
    path, _ = make_fp8_checkpoint(tmp_path / "model", form)
    config = config_of(path, "torch-cpu")

    async def generate(config: EngineConfig) -> tuple[list[TokenEvent], RunnerInfo]:
        params = SamplingParams(max_new_tokens=4, ignore_eos=True, logprobs=2)
        async with Engine(config) as engine:
            events = await collect(engine, list(range(30, 52)), params)
            return list(events), engine.info.runner

    events, info = run(generate(config))
    others, native = run(generate(replace(config, device="cpu")))
    assert (info.quantize, native.quantize) == ("fp8", "")
    assert "linear_quantized" in info.kernels
    assert info.weight_bytes < 0.8 * native.weight_bytes
    assert len(events) == len(others)
    assert events[0].logprob == pytest.approx(others[0].logprob, abs=0.1)


def test_the_cpu_engine_makes_no_fp8() -> None:
    async def start() -> None:
        async with Engine(config_of(cached_checkpoint("llama2"), "cpu", quantize="fp8")):
            pass

    with pytest.raises(UserError, match="quantize=fp8 needs device=cuda; set quantize=int8"):
        run(start())


def test_unknown_kernels_are_found_before_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start() -> None:
        async with Engine(config_of(Path("nowhere"), "torch-cpu")):
            pass

    monkeypatch.setenv("LMI_OPS", "attention:magic")
    with pytest.raises(UserError, match="LMI_OPS has 'attention:magic'"):
        run(start())


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="Triton's interpreter wants a process of its own: make test-triton",
)
def test_triton_same_tokens_as_native(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel in one small model: grouped queries, norms of heads, a window."""
    pytest.importorskip("triton")
    model = make_checkpoint(
        tmp_path / "model", "qwen3_window", num_hidden_layers=1, max_window_layers=0
    )
    monkeypatch.setenv("LMI_OPS", "triton")

    async def generate(device: str) -> list[list[TokenEvent]]:
        params = SamplingParams(max_new_tokens=3, ignore_eos=True, logprobs=2)
        async with Engine(config_of(model, device, max_num_batched_tokens=16)) as engine:
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
    from lmi_core.engine.device_runner import load_device_runner
    from lmi_core.models import loader

    def fill(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(loader, "load_model", fill)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 24 * 2**30))
    config = config_of(cached_checkpoint("llama2"), "torch-cpu")
    with pytest.raises(InsufficientMemoryError, match=r"of the GPU's 24.0 GiB: set quantize=int4"):
        load_device_runner(config)


def test_steps_run_ahead_of_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of sequences that stay take their token from other rows when some have ended."""
    from lmi_core.engine.torch_runner import TorchRunner

    rows: list[list[int]] = []
    submit_ahead = TorchRunner.submit_ahead

    def count(self: TorchRunner, step: object, logit_rows: list[int]) -> None:
        rows.append(logit_rows)
        submit_ahead(self, step, logit_rows)  # type: ignore[arg-type]

    monkeypatch.setattr(TorchRunner, "submit_ahead", count)
    monkeypatch.setattr(loop, "MAX_AHEAD_S", 1e3)  # whatever else the machine does
    config = config_of(cached_checkpoint("llama2"), "torch-cpu")

    async def generate(config: EngineConfig) -> list[list[int]]:
        async with Engine(config, check_integrity=True) as engine:
            lengths = (3, 9, 12)
            results = await asyncio.gather(
                *(
                    collect(
                        engine,
                        [5 + length, 6],
                        SamplingParams(max_new_tokens=length, ignore_eos=True),
                    )
                    for length in lengths
                )
            )
        return [[event.token_id for event in events] for events in results]

    ahead = run(generate(config))
    assert [0, 1, 2] in rows
    assert [1, 2] in rows
    num_ahead = len(rows)
    assert ahead == run(generate(replace(config, overlap=False)))
    assert len(rows) == num_ahead
