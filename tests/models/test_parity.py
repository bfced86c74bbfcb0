"""The decoder against transformers on tiny random checkpoints of every family."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.checkpoints import VARIANTS, cached_checkpoint
from tests.loading import load_model
from tests.models.forward import Forward, NativeForward, TorchForward, all_logits

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

NUM_SEQUENCES = 8
NUM_NEW_TOKENS = 64
MAX_MODEL_LEN = 512
BACKENDS = ("torch", "native")


def make_forward(
    backend: str, variant: str, dtype: str, checkpoint_dtype: str, max_model_len: int
) -> Forward:
    path = cached_checkpoint(variant, dtype=checkpoint_dtype)
    if backend == "native":
        model = load_model(path, dtype)  # type: ignore[arg-type]
        return NativeForward(model, max_model_len, dtype)
    from tests.ops.torch_store import TorchWeights

    model = load_model(path, "fp32", packer=TorchWeights())
    return TorchForward(model, max_model_len, dtype)


def oracle_model(variant: str, checkpoint_dtype: str, dtype: str) -> Any:
    transformers.logging.disable_progress_bar()
    path = cached_checkpoint(variant, dtype=checkpoint_dtype)
    # Of experts, the only implementation with float64.
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype), experts_implementation="eager"
    )


def oracle_logits(model: Any, sequences: list[list[int]]) -> list[npt.NDArray[Any]]:
    """Each sequence on its own, no padding, no cache."""
    with torch.no_grad():
        return [
            model(torch.tensor([ids]), use_cache=False).logits[0].double().numpy()
            for ids in sequences
        ]


@functools.cache
def greedy_sequences(variant: str) -> tuple[tuple[int, ...], ...]:
    """Prompts of mixed lengths, each continued greedily by transformers in fp32."""
    random = np.random.default_rng(3)
    lengths = random.integers(3, 70, NUM_SEQUENCES)
    prompts = [random.integers(4, 384, length).tolist() for length in lengths]
    width = max(lengths)
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    model = oracle_model(variant, "float32", "float32")
    output = model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        min_new_tokens=NUM_NEW_TOKENS,
        max_new_tokens=NUM_NEW_TOKENS,
        pad_token_id=0,
    )
    return tuple(
        tuple(row[width - len(prompt) :])
        for row, prompt in zip(output.tolist(), prompts, strict=True)
    )


@functools.cache
def exact_logits(variant: str, checkpoint_dtype: str) -> npt.NDArray[np.float64]:
    sequences = [list(ids) for ids in greedy_sequences(variant)]
    return np.concatenate(
        oracle_logits(oracle_model(variant, checkpoint_dtype, "float64"), sequences)
    )


@functools.cache
def greedy_rows(variant: str) -> npt.NDArray[np.float64]:
    """What transformers, in fp32, makes of the same sequences whole."""
    sequences = [list(ids) for ids in greedy_sequences(variant)]
    return np.concatenate(oracle_logits(oracle_model(variant, "float32", "float32"), sequences))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS, scope="module")
def test_fp32_logits_and_greedy_tokens(variant: str, backend: str) -> None:
    sequences = [list(ids) for ids in greedy_sequences(variant)]
    forward = make_forward(backend, variant, "fp32", "float32", MAX_MODEL_LEN)
    logits = np.concatenate(all_logits(forward, sequences, max_chunk=48))
    exact = exact_logits(variant, "float32")
    assert 0.7 < exact.std() < 1.4
    assert np.abs(logits - exact).max() <= 1e-4 * exact.std()

    oracle_rows = greedy_rows(variant)
    top = np.sort(oracle_rows, axis=1)[:, -2:]
    clear = top[:, 1] - top[:, 0] >= 1e-3
    assert clear.mean() >= 0.98
    assert len(sequences) * NUM_NEW_TOKENS <= clear.sum()
    np.testing.assert_array_equal(logits.argmax(1)[clear], oracle_rows.argmax(1)[clear])


# Nobody is compared with the reference in bf16.
@pytest.mark.parametrize("variant", VARIANTS, scope="module")
def test_bf16_error_is_close_to_that_of_transformers(variant: str) -> None:
    sequences = [list(ids) for ids in greedy_sequences(variant)]
    forward = make_forward("native", variant, "bf16", "bfloat16", MAX_MODEL_LEN)
    logits = np.concatenate(all_logits(forward, sequences, max_chunk=48))
    theirs = np.concatenate(oracle_logits(oracle_model(variant, "bfloat16", "bfloat16"), sequences))
    exact = exact_logits(variant, "bfloat16")
    assert rms(logits - exact) <= 1.5 * rms(theirs - exact)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dynamic_rope_uses_the_factor_of_the_longest_context(backend: str) -> None:
    max_model_len = 1024
    model = oracle_model("llama_dynamic", "float32", "float64")
    rotary = model.model.rotary_emb
    rope_init = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["dynamic"]
    rotary.inv_freq = rope_init(model.config, "cpu", seq_len=max_model_len)[0]
    sequences = [list(ids) for ids in greedy_sequences("llama_dynamic")[:4]]
    exact = np.concatenate(oracle_logits(model, sequences))
    forward = make_forward(backend, "llama_dynamic", "fp32", "float32", max_model_len)
    logits = np.concatenate(all_logits(forward, sequences, max_chunk=48))
    assert np.abs(logits - exact).max() <= 1e-4 * exact.std()
    unscaled = exact_logits("llama_dynamic", "float32")[: len(exact)]
    assert np.abs(unscaled - exact).max() > 0.1 * exact.std()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("max_chunk", [1, 7, 400])
def test_chunked_prefill_over_a_window(max_chunk: int, backend: str) -> None:
    """Long sequences, many times the window and several attention partitions."""
    random = np.random.default_rng(5)
    sequences = [random.integers(4, 384, length).tolist() for length in (300, 270)]
    exact = np.concatenate(
        oracle_logits(oracle_model("qwen2_window", "float32", "float64"), sequences)
    )
    forward = make_forward(backend, "qwen2_window", "fp32", "float32", MAX_MODEL_LEN)
    logits = np.concatenate(all_logits(forward, sequences, max_chunk))
    assert np.abs(logits - exact).max() <= 1e-4 * exact.std()


def rms(values: npt.NDArray[Any]) -> float:
    return float(np.sqrt(np.mean(np.square(values))))
