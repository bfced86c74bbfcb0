"""Coded caches and weights on torch devices, beside the CPU engine's."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lmi_core.engine.engine import Engine
from lmi_core.engine.outputs import TokenEvent
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.runners.runner import RunnerInfo
from lmi_core.settings.engine_config import EngineConfig
from tests.checkpoints import cached_checkpoint, make_checkpoint
from tests.engine.harness import collect, run
from tests.fp8_checkpoints import make_fp8_checkpoint
from tests.tiny_tokenizer import VOCAB_SIZE

torch = pytest.importorskip("torch", exc_type=ImportError)
from tests.runners.device.torch_harness import config_of  # noqa: E402


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


# Triton's kernels for either code are tried by the ops' tests, in a tenth of the time.
@pytest.mark.parametrize(
    ("kv_dtype", "error", "kernels"),
    [
        *(("fp8_e4m3fn", 0.05, kernels) for kernels in ("torch", "triton", "native")),
        *(("fp8_e5m2", 0.1, kernels) for kernels in ("torch", "native")),
    ],
)
def test_an_fp8_cache_serves(
    monkeypatch: pytest.MonkeyPatch, scaled: Path, kv_dtype: str, error: float, kernels: str
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
    from tests.loading import load_model

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


@pytest.mark.parametrize(("kv_dtype", "most"), [("fp8_e4m3fn", 0.02), ("fp8_e5m2", 0.08)])
def test_the_cpu_engines_fp8_cache_is_as_torchs(scaled: Path, kv_dtype: str, most: float) -> None:
    """With the checkpoint's scales. Numbers between two codes may go to either."""
    reference, info = run(scored(config_of(scaled, "torch-cpu", kv_dtype=kv_dtype)))
    got, stored = run(scored(config_of(scaled, "cpu", kv_dtype=kv_dtype)))
    assert (stored.kv_dtype, stored.num_blocks) == (info.kv_dtype, info.num_blocks)
    assert got == pytest.approx(reference, abs=most)
    exact, _ = run(scored(config_of(scaled, "cpu")))
    assert got != exact


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_the_scales_of_an_fp8_cache_are_no_others(scaled: Path, kv_dtype: str) -> None:
    plain = config_of(cached_checkpoint("llama2"), "cpu", kv_dtype=kv_dtype)
    got, _ = run(scored(config_of(scaled, "cpu", kv_dtype=kv_dtype)))
    assert got == run(scored(plain))[0]


async def generate(config: EngineConfig) -> tuple[list[TokenEvent], RunnerInfo]:
    params = SamplingParams(max_new_tokens=4, ignore_eos=True, logprobs=2)
    async with Engine(config) as engine:
        events = await collect(engine, list(range(30, 52)), params)
        return list(events), engine.info.runner


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantized_weights_serve(quantize: str) -> None:
    """The same weights as the CPU engine's, whose activations are rounded too."""
    config = config_of(cached_checkpoint("llama2"), "torch-cpu", quantize=quantize)

    events, info = run(generate(config))
    others, native = run(generate(replace(config, device="cpu")))
    assert info.quantize == native.quantize == quantize
    assert "linear_packed" in info.kernels
    assert info.weight_bytes == pytest.approx(native.weight_bytes, rel=0.1)
    assert len(events) == len(others)
    assert events[0].logprob == pytest.approx(others[0].logprob, abs=0.05)


@pytest.mark.parametrize("form", ["row", "block", "tensor"])
def test_fp8_checkpoints_serve(tmp_path: Path, form: str) -> None:
    """As the CPU engine, which has the same weights in bf16, but for the activations' rounding: row
    by row, or by the checkpoint's scales."""
    path, _ = make_fp8_checkpoint(tmp_path / "model", form)
    config = config_of(path, "torch-cpu")

    events, info = run(generate(config))
    others, native = run(generate(replace(config, device="cpu")))
    assert (info.quantize, native.quantize) == ("fp8", "")
    assert "linear_quantized" in info.kernels
    assert info.weight_bytes < 0.8 * native.weight_bytes
    assert len(events) == len(others)
    assert events[0].logprob == pytest.approx(others[0].logprob, abs=0.1)
