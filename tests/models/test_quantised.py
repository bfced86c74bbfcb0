"""Models whose weights are quantised at load, beside fp32 models of the same, rounded weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from lmi_core import _native
from lmi_core.models.loader import LoadedModel
from lmi_core.ops.cpu import NativeWeights
from lmi_core.ops.operands import LinearWeight
from lmi_core.weights.formats import PackFormat, Quantization
from tests.checkpoints import cached_checkpoint
from tests.loading import load_model
from tests.models.forward import NativeForward, TorchForward, all_logits
from tests.ops.torch_store import TorchWeights

MOST_ERROR = 0.06
"""What int8 activations may cost in three random layers, relative to the logits."""


class Dequantised(NativeWeights):
    """Quantised weights as an fp32 model has them: what is left is the activations' share."""

    def pack(
        self,
        parts: Sequence[Any],
        *,
        names: Sequence[str] = (),
        format: PackFormat,
        gated: bool,
        num_experts: int = 1,
    ) -> LinearWeight:
        if format not in ("int8", "int4"):
            return super().pack(parts, format=format, gated=gated, num_experts=num_experts)
        weights = [super(Dequantised, self).pack([p], format=format, gated=False) for p in parts]
        floats = [weight.unpack() for weight in weights]
        return super().pack(floats, format="fp32", gated=gated, num_experts=num_experts)


def logits_of(model: LoadedModel, act_dtype: str) -> np.ndarray:
    random = np.random.default_rng(2)
    sequences = [random.integers(4, 384, length).tolist() for length in (90, 33, 7)]
    return np.concatenate(all_logits(NativeForward(model, 128, act_dtype), sequences, max_chunk=48))


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("variant", ["llama_bias", "llama_tied", "qwen3"])
@pytest.mark.parametrize(("stored", "dtype"), [("float32", "fp32"), ("bfloat16", "bf16")])
def test_logits_are_close(variant: str, stored: str, dtype: str, quantize: Quantization) -> None:
    path = cached_checkpoint(variant, dtype=stored)
    exact = logits_of(load_model(path, "fp32", quantize=quantize, packer=Dequantised()), "fp32")
    model = load_model(path, quantize=quantize)
    assert (model.dtype, model.quantize) == (dtype, quantize)
    error = logits_of(model, dtype) - exact
    assert 0 < np.sqrt(np.mean(error**2)) <= MOST_ERROR * exact.std()


def test_formats_of_the_matrices() -> None:
    """Layers as asked, the head int8 in both: its errors would go straight into the logits."""
    path = cached_checkpoint("llama3", dtype="bfloat16")
    for quantize in ("int8", "int4"):
        weights = load_model(path, quantize=quantize).weights
        layer = weights.layers[0]
        for linear in (layer.qkv, layer.attention_output, layer.gate_up, layer.down):
            assert isinstance(linear.weight, _native.LinearWeight)
            assert linear.weight.format == quantize
        assert isinstance(weights.head.weight, _native.LinearWeight)
        assert weights.head.weight.format == "int8"
        assert weights.embedding.dtype == np.uint16


def test_norms_quantise_what_linears_read() -> None:
    """No pass over the rows of its own where a norm comes before."""
    model = load_model(cached_checkpoint("llama3"), quantize="int8")
    lines = NativeForward(model, 64, "fp32").graph.describe()
    ops = [line.split()[0] for line in lines]
    assert ops.count("quantize_rows") == 2 * model.spec.num_layers
    for line in lines:
        if line.startswith("rms_norm"):
            assert "int8" in line.split("->")[1]


@pytest.mark.parametrize("variant", ["llama2", "qwen3"])
def test_an_int8_cache_gives_the_logits_of_the_reference(variant: str) -> None:
    """p and q are rounded to bf16 on the way, which the reference doesn't do."""
    path = cached_checkpoint(variant)
    random = np.random.default_rng(3)
    sequences = [random.integers(4, 384, length).tolist() for length in (90, 33, 7)]
    native = NativeForward(load_model(path, "fp32"), 128, "fp32", kv_dtype="int8")
    reference = load_model(path, "fp32", packer=TorchWeights())
    exact, stored = (
        np.concatenate(all_logits(TorchForward(reference, 128, "fp32", kv_dtype), sequences, 48))
        for kv_dtype in ("fp32", "int8")
    )
    got = np.concatenate(all_logits(native, sequences, 48))
    size = np.abs(exact).max()
    assert np.abs(got - stored).max() < 0.02 * size
    assert 0 < np.abs(stored - exact).max() < 0.05 * size
