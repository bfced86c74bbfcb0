"""Every family on tiny random checkpoints of ``tests.checkpoints.FAMILIES``: against transformers,
in any batch, quantised and with adapters."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

from tests.adapters import test_lora_parity as lora
from tests.checkpoints import (
    FAMILIES,
    SHAPE,
    VARIANTS,
    cached_checkpoint,
    draw_weights,
    make_checkpoint,
)
from tests.loading import load_model
from tests.lora_adapters import adapter_tensors, write_adapter
from tests.models.forward import (
    EagerForward,
    Forward,
    NativeForward,
    Rows,
    TorchForward,
    all_logits,
)
from tests.models.test_parity import oracle_logits, oracle_model, rms
from tests.models.test_quantised import MOST_ERROR, Dequantised
from tests.tiny_tokenizer import EOS_ID

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

MAX_MODEL_LEN = 128
NUM_NEW_TOKENS = 32
BACKENDS = ("reference", "eager", "native")
Logits = npt.NDArray[Any]

# All tests of a variant come one after the other, in one process, which keeps its texts and logits.
of_families = pytest.mark.parametrize("variant", FAMILIES, scope="module")
of_all = pytest.mark.parametrize("variant", [*FAMILIES, *VARIANTS], scope="module")


def make_forward(backend: str, variant: str, dtype: str, stored: str) -> Forward:
    path = cached_checkpoint(variant, dtype=stored)
    if backend == "native":
        return NativeForward(load_model(path), MAX_MODEL_LEN, dtype)
    if backend == "eager":
        from lmi_core.ops.device.torch_weights import DeviceWeights

        model = load_model(path, packer=DeviceWeights(torch.device("cpu")))
        return EagerForward(model, MAX_MODEL_LEN, dtype)
    from tests.ops.torch_store import TorchWeights

    return TorchForward(load_model(path, packer=TorchWeights()), MAX_MODEL_LEN, dtype)


@functools.cache
def sequences(variant: str) -> list[list[int]]:
    """Prompts of mixed lengths, each continued greedily; that transformers goes on alike is what
    ``test_fp32_logits_and_greedy_tokens`` shows."""
    random = np.random.default_rng(3)
    texts = [random.integers(4, 384, length).tolist() for length in (1, 5, 29, 60)]
    forward, starts = make_forward("native", variant, "fp32", "float32"), [0] * len(texts)
    for _ in range(NUM_NEW_TOKENS):
        batch = [Rows(i, ids[starts[i] :], starts[i]) for i, ids in enumerate(texts)]
        logits = forward.step(batch)
        logits[:, EOS_ID] = -np.inf
        last = np.cumsum([len(rows.token_ids) for rows in batch]) - 1
        starts = [len(ids) for ids in texts]
        for ids, token_id in zip(texts, logits[last].argmax(1).tolist(), strict=True):
            ids.append(token_id)
    return texts


@functools.cache
def exact_logits(variant: str, stored: str) -> Logits:
    oracle = oracle_model(variant, stored, "float64")
    return np.concatenate(oracle_logits(oracle, sequences(variant)))


@functools.cache
def rounding_of_transformers(variant: str) -> float:
    """By how much bf16 changes its logits."""
    oracle = oracle_model(variant, "bfloat16", "bfloat16")
    theirs = np.concatenate(oracle_logits(oracle, sequences(variant)))
    return rms(theirs - exact_logits(variant, "bfloat16"))


def run(forward: Forward, variant: str, max_chunk: int = 48, seed: int = 0) -> Logits:
    return np.concatenate(all_logits(forward, sequences(variant), max_chunk, seed))


@pytest.mark.parametrize("backend", BACKENDS)
@of_families
def test_fp32_logits_and_greedy_tokens(variant: str, backend: str) -> None:
    logits = run(make_forward(backend, variant, "fp32", "float32"), variant)
    exact = exact_logits(variant, "float32")
    assert exact.std() > 0.7
    assert np.abs(logits - exact).max() <= 1e-4 * exact.std()
    exact, logits = exact.copy(), logits.copy()
    exact[:, EOS_ID] = logits[:, EOS_ID] = -np.inf  # which the texts don't have
    top = np.sort(exact, axis=1)[:, -2:]
    clear = top[:, 1] - top[:, 0] >= 1e-3
    first = 0
    for ids in sequences(variant):
        rows = slice(first + len(ids) - NUM_NEW_TOKENS - 1, first + len(ids) - 1)
        first += len(ids)
        assert clear[rows].mean() >= 0.9
        wanted = np.array(ids[-NUM_NEW_TOKENS:])[clear[rows]]
        for each in (exact, logits):
            np.testing.assert_array_equal(each[rows].argmax(1)[clear[rows]], wanted)


# Nobody is compared with the reference in bf16.
@pytest.mark.parametrize("backend", BACKENDS[1:])
@of_families
def test_bf16_error_is_close_to_that_of_transformers(variant: str, backend: str) -> None:
    logits = run(make_forward(backend, variant, "bf16", "bfloat16"), variant)
    error = rms(logits - exact_logits(variant, "bfloat16"))
    assert error <= 1.5 * rounding_of_transformers(variant)


@of_all
def test_same_bits_in_any_batch(variant: str) -> None:
    for dtype, stored in (("fp32", "float32"), ("bf16", "bfloat16")):
        forward = make_forward("native", variant, dtype, stored)
        one = run(forward, variant, max_chunk=7, seed=1)
        np.testing.assert_array_equal(run(forward, variant, max_chunk=60, seed=2), one)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@of_all
def test_quantised_logits_are_close(variant: str, quantize: Any) -> None:
    path = cached_checkpoint(variant)
    floats = load_model(path, "fp32", quantize=quantize, packer=Dequantised())
    exact = run(NativeForward(floats, MAX_MODEL_LEN, "fp32"), variant)
    model = load_model(path, quantize=quantize)
    assert model.quantize == quantize
    error = run(NativeForward(model, MAX_MODEL_LEN, "fp32"), variant) - exact
    assert 0 < rms(error) <= 1.5 * MOST_ERROR * exact.std()


@of_families
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
    """The last part of the names of the matrices of the first layer that take adapters: routers,
    experts and what leads to the latents of latent attention take none."""
    names = {
        name.split(".")[-2]
        for name, tensor in load_file(path / "model.safetensors").items()
        if ".0." in name and name.endswith(".weight") and tensor.ndim == 2
        if "norm" not in name.split(".")[-2]
        if not any(part in name for part in ("expert", "gate.weight", "router"))
    }
    latent = {"q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"}
    return names - latent if "kv_b_proj" in names else names


def test_the_text_part_of_a_multimodal_model(tmp_path: Path) -> None:
    """Its own configuration, and tensors beside those of the vision part, which are left out."""
    from transformers import AutoModelForImageTextToText, Gemma3Config, Gemma3TextConfig

    text = {**SHAPE, **FAMILIES["gemma3"][1]}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(
        text_config=Gemma3TextConfig(**text), vision_config=vision, mm_tokens_per_image=4
    )
    check_multimodal(AutoModelForImageTextToText.from_config(config), tmp_path)


def test_a_multimodal_model_with_its_own_head(tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText, Mistral3Config

    text = {**SHAPE, "model_type": "mistral", "tie_word_embeddings": False}
    vision = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16}
    vision |= {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    check_multimodal(AutoModelForImageTextToText.from_config(config), tmp_path)


def check_multimodal(model: Any, path: Path) -> None:
    draw_weights(model, seed=0)
    model.float().save_pretrained(path)
    inputs = [list(range(4, 60)), [7, 300, 200]]
    exact = np.concatenate(oracle_logits(model.double(), inputs))
    loaded = load_model(path)
    logits = all_logits(NativeForward(loaded, MAX_MODEL_LEN, "fp32"), inputs, max_chunk=9)
    assert np.abs(np.concatenate(logits) - exact).max() <= 1e-4 * exact.std()


@pytest.mark.parametrize("wrapper", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_older_and_wrapped_names_are_read(tmp_path: Path, wrapper: str) -> None:
    path = shutil.copytree(cached_checkpoint("gpt_neox"), tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    endings = {"norm.weight": "norm.gamma", "norm.bias": "norm.beta"}
    renamed = {}
    for name, tensor in tensors.items():
        old = next((name.removesuffix(e) + o for e, o in endings.items() if name.endswith(e)), name)
        renamed[wrapper + old] = tensor
    assert any(name.endswith("norm.gamma") for name in renamed)
    save_file(renamed, path / "model.safetensors")
    loaded, wanted = load_model(path), load_model(cached_checkpoint("gpt_neox"))
    assert np.array_equal(loaded.weights.embedding, wanted.weights.embedding)
    for ours, theirs in zip(loaded.weights.layers, wanted.weights.layers, strict=True):
        assert np.array_equal(ours.mlp_norm.weight, theirs.mlp_norm.weight)  # type: ignore[union-attr]
        assert np.array_equal(ours.mlp_norm.bias, theirs.mlp_norm.bias)  # type: ignore[union-attr]


def test_tensors_saved_without_the_head_lack_the_prefix(tmp_path: Path) -> None:
    path = cached_checkpoint("smollm3")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    tensors = load_file(path / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(bare, tmp_path / "model.safetensors")
    whole, found = load_model(path), load_model(tmp_path)
    np.testing.assert_array_equal(whole.weights.embedding, found.weights.embedding)


@pytest.mark.parametrize(
    ("variant", "settings"),
    [
        ("phi", {"tie_word_embeddings": True}),
        ("gptj", {"tie_word_embeddings": True}),
        ("codegen", {"tie_word_embeddings": True}),
        ("gpt2", {"scale_attn_weights": False}),
        ("gpt_bigcode", {"scale_attn_weights": False}),
        ("gemma", {"attention_bias": True}),
        ("gemma", {"hidden_act": "relu"}),
        ("gemma2", {"attention_bias": True}),
        ("gemma3", {"attention_bias": True}),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 7, "layer_types": None}),
    ],
)
def test_settings_that_few_checkpoints_have(
    variant: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    path = make_checkpoint(tmp_path, variant, tokenizer=False, **settings)
    written = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(written | settings))
    inputs = [list(range(4, 60)), [7, 300, 200]]
    oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    exact = np.concatenate(oracle_logits(oracle, inputs))
    logits = all_logits(NativeForward(load_model(path), MAX_MODEL_LEN, "fp32"), inputs, max_chunk=9)
    assert np.abs(np.concatenate(logits) - exact).max() <= 1e-4 * exact.std()


@pytest.mark.parametrize(("served", "length"), [(256, 200), (512, 300)])
def test_what_is_served_chooses_the_factors_of_long_rope(served: int, length: int) -> None:
    """The lists that Transformers has for a text that fits into the original 256 tokens, and for
    one that doesn't, also in the chunks of it that do."""
    inputs = [np.random.default_rng(4).integers(4, 384, length).tolist()]
    [exact] = oracle_logits(oracle_model("phi3", "float32", "float64"), inputs)
    forward = NativeForward(load_model(cached_checkpoint("phi3")), served, "fp32")
    [logits] = all_logits(forward, inputs, max_chunk=48)
    assert np.abs(logits - exact).max() <= 1e-4 * exact.std()


def test_contexts_end_where_queries_would_be_scaled(tmp_path: Path) -> None:
    """Ministral 3's factor is 1 before the positions that it was trained on first end."""
    path = make_checkpoint(tmp_path, "mistral", tokenizer=False)
    config = json.loads((path / "config.json").read_text())
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
    rope |= {"original_max_position_embeddings": 128}
    for beta, most in ((None, 512), (0.1, 128)):
        config["rope_parameters"] = rope | ({"llama_4_scaling_beta": beta} if beta else {})
        (path / "config.json").write_text(json.dumps(config))
        assert load_model(path).spec.max_positions == most


@pytest.mark.parametrize(("model_type", "window"), [("mistral", 4096), ("ministral3", 0)])
def test_windows_of_files_that_name_none(model_type: str, window: int, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "mistral", tokenizer=False)
    config = json.loads((path / "config.json").read_text())
    del config["sliding_window"]
    (path / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
    assert set(load_model(path).spec.attention.windows) == {window}
