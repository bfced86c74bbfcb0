"""Every family on tiny random checkpoints of ``tests.checkpoints.FAMILIES``: against transformers,
in any batch, quantised and with adapters."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

from lmi_core.models.loader import load_model
from tests.checkpoints import EOS_ID, FAMILIES, cached_checkpoint
from tests.lora_adapters import adapter_tensors, write_adapter
from tests.models import test_lora_parity as lora
from tests.models.forward import EagerForward, Forward, NativeForward, TorchForward, all_logits
from tests.models.test_parity import oracle_logits, oracle_model, rms
from tests.models.test_quantised import MOST_ERROR, Dequantised

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

MAX_MODEL_LEN = 128
NUM_NEW_TOKENS = 64
BACKENDS = ("reference", "eager", "native")
Logits = npt.NDArray[Any]


def make_forward(backend: str, variant: str, dtype: str, stored: str) -> Forward:
    path = cached_checkpoint(variant, dtype=stored)
    if backend == "native":
        return NativeForward(load_model(path), MAX_MODEL_LEN, dtype)
    if backend == "eager":
        from lmi_core.ops.torch_weights import DeviceWeights

        model = load_model(path, backend=DeviceWeights(torch.device("cpu")))
        return EagerForward(model, MAX_MODEL_LEN, dtype)
    from lmi_core.ops.torch_reference import TorchWeights

    return TorchForward(load_model(path, backend=TorchWeights()), MAX_MODEL_LEN, dtype)


@functools.cache
def sequences(variant: str) -> list[list[int]]:
    """Prompts of mixed lengths, each continued greedily by transformers in fp32."""
    random = np.random.default_rng(3)
    model = oracle_model(variant, "float32", "float32")
    prompts = [random.integers(4, 384, length).tolist() for length in (1, 5, 29, 60)]
    lengths: dict[str, Any] = {"min_new_tokens": NUM_NEW_TOKENS, "max_new_tokens": NUM_NEW_TOKENS}
    lengths |= {"do_sample": False, "pad_token_id": 0}
    return [model.generate(torch.tensor([ids]), **lengths)[0].tolist() for ids in prompts]


@functools.cache
def exact_logits(variant: str, stored: str) -> Logits:
    oracle = oracle_model(variant, stored, "float64")
    return np.concatenate(oracle_logits(oracle, sequences(variant)))


def run(forward: Forward, variant: str, max_chunk: int = 48, seed: int = 0) -> Logits:
    return np.concatenate(all_logits(forward, sequences(variant), max_chunk, seed))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", FAMILIES)
def test_fp32_logits_and_greedy_tokens(variant: str, backend: str) -> None:
    logits = run(make_forward(backend, variant, "fp32", "float32"), variant)
    exact = exact_logits(variant, "float32")
    assert exact.std() > 0.7
    assert np.abs(logits - exact).max() <= 1e-4 * exact.std()
    exact, logits = exact.copy(), logits.copy()
    exact[:, EOS_ID] = logits[:, EOS_ID] = -np.inf  # which the oracle was kept from
    top = np.sort(exact, axis=1)[:, -2:]
    clear = top[:, 1] - top[:, 0] >= 1e-3
    first = 0
    for ids in sequences(variant):
        rows = slice(first + len(ids) - NUM_NEW_TOKENS - 1, first + len(ids) - 1)
        first += len(ids)
        assert clear[rows].mean() >= 0.9
        chosen = logits[rows].argmax(1)
        np.testing.assert_array_equal(
            chosen[clear[rows]], np.array(ids[-NUM_NEW_TOKENS:])[clear[rows]]
        )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", FAMILIES)
def test_bf16_error_is_close_to_that_of_transformers(variant: str, backend: str) -> None:
    logits = run(make_forward(backend, variant, "bf16", "bfloat16"), variant)
    oracle = oracle_model(variant, "bfloat16", "bfloat16")
    theirs = np.concatenate(oracle_logits(oracle, sequences(variant)))
    exact = exact_logits(variant, "bfloat16")
    assert rms(logits - exact) <= 1.5 * rms(theirs - exact)


@pytest.mark.parametrize("variant", FAMILIES)
def test_same_bits_in_any_batch(variant: str) -> None:
    for dtype, stored in (("fp32", "float32"), ("bf16", "bfloat16")):
        forward = make_forward("native", variant, dtype, stored)
        one = run(forward, variant, max_chunk=7, seed=1)
        np.testing.assert_array_equal(run(forward, variant, max_chunk=60, seed=2), one)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("variant", FAMILIES)
def test_quantised_logits_are_close(variant: str, quantize: Any) -> None:
    path = cached_checkpoint(variant)
    floats = load_model(path, "fp32", quantize=quantize, backend=Dequantised())
    exact = run(NativeForward(floats, MAX_MODEL_LEN, "fp32"), variant)
    model = load_model(path, quantize=quantize)
    assert model.quantize == quantize
    error = run(NativeForward(model, MAX_MODEL_LEN, "fp32"), variant) - exact
    assert 0 < rms(error) <= 1.5 * MOST_ERROR * exact.std()


@pytest.mark.parametrize("variant", FAMILIES)
def test_adapters_of_every_linear(variant: str, tmp_path: Path) -> None:
    path = cached_checkpoint(variant)
    tensors = adapter_tensors(path, rank=4, targets=layer_modules(path))
    adapter = write_adapter(tmp_path / "adapter", tensors, rank=4, alpha=4)
    inputs = sequences(variant)
    slots = (lora.FIRST, lora.BASE) * (len(inputs) // 2)
    merged = lora.merged_logits(path, tensors, 1.0, inputs, tmp_path / "merged")
    base = oracle_logits(oracle_model(variant, "float32", "float64"), inputs)
    logits = all_logits(
        lora.make_forward("native", path, [adapter], "fp32"), inputs, max_chunk=30, adapters=slots
    )
    for seq_id, slot in enumerate(slots):
        wanted = merged[seq_id] if slot == lora.FIRST else base[seq_id]
        assert np.abs(logits[seq_id] - wanted).max() <= 1e-4 * wanted.std()
        assert np.abs(merged[seq_id] - base[seq_id]).max() > 0.1 * wanted.std()


def layer_modules(path: Path) -> set[str]:
    """The last part of the names of the matrices of the first layer."""
    return {
        name.split(".")[-2]
        for name, tensor in load_file(path / "model.safetensors").items()
        if ".0." in name and name.endswith(".weight") and tensor.ndim == 2 and "norm" not in name
    }
