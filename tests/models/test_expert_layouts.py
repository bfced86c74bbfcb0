"""How checkpoints hold mixtures of experts, and what is beside them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

from lmi_core.adapters.adapter import check_adapter_fits
from lmi_core.errors import ModelError
from lmi_core.models.loader import LoadedModel, load_model
from lmi_core.ops.cpu import NativeWeights
from lmi_core.weights.mxfp4 import decode_mxfp4
from tests.checkpoints import cached_checkpoint, make_checkpoint
from tests.lora_adapters import write_adapter
from tests.models.forward import NativeForward, TorchForward, all_logits
from tests.ops.torch_store import TorchWeights

pytest.importorskip("torch")

Tensors = dict[str, npt.NDArray[np.generic]]
INPUTS = [list(range(4, 60)), [7, 300, 200]]


def logits_of(model: Path | LoadedModel) -> npt.NDArray[np.float32]:
    model = load_model(model) if isinstance(model, Path) else model
    forward = NativeForward(model, 128, "fp32")
    return np.concatenate(all_logits(forward, INPUTS, max_chunk=9))


def write(path: Path, source: Path, tensors: Tensors, **config: object) -> Path:
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    values = json.loads((source / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | config))
    return path


def test_merged_tensors_are_the_experts_of_each(tmp_path: Path) -> None:
    source = cached_checkpoint("qwen3_moe")
    tensors = load_file(source / "model.safetensors")
    for layer in (0, 2):
        prefix = f"model.layers.{layer}.mlp.experts"
        parts = {
            part: np.stack([tensors.pop(f"{prefix}.{i}.{part}_proj.weight") for i in range(8)])
            for part in ("gate", "up", "down")
        }
        tensors[f"{prefix}.gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], axis=1)
        tensors[f"{prefix}.down_proj"] = parts["down"]
    merged = write(tmp_path / "merged", source, tensors)
    np.testing.assert_array_equal(logits_of(merged), logits_of(source))


def test_mxfp4_is_what_it_stands_for(tmp_path: Path) -> None:
    source = cached_checkpoint("gpt_oss")
    floats = load_file(source / "model.safetensors")
    blocks = dict(floats)
    random = np.random.default_rng(0)
    for name in [name for name in floats if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, num_inputs, num_outputs = floats[name].shape
        shape = num_experts, num_outputs, num_inputs // 32
        codes = random.integers(0, 256, (*shape, 16), dtype=np.uint8)
        scales = random.integers(121, 124, shape, dtype=np.uint8)
        decoded = [decode_mxfp4(*expert) for expert in zip(codes, scales, strict=True)]
        bits = np.stack(decoded).astype(np.uint32) << 16
        floats[name] = np.ascontiguousarray(bits.view(np.float32).swapaxes(1, 2))
        del blocks[name]
        blocks[f"{name}_blocks"], blocks[f"{name}_scales"] = codes, scales
    plain = write(tmp_path / "floats", source, floats)
    coded = write(tmp_path / "mxfp4", source, blocks, quantization_config={"quant_method": "mxfp4"})
    exact = logits_of(plain)
    as_rows_are = load_model(coded, backend=NativeWeights(activations="bf16"))
    np.testing.assert_allclose(logits_of(as_rows_are), exact, atol=1e-4 * exact.std())
    rounded = logits_of(load_model(coded)) - exact
    assert 0 < np.sqrt(np.mean(rounded**2)) < 0.05 * exact.std()
    # Devices without such products widen them, and quantising anew does so first.
    widened = all_logits(
        TorchForward(load_model(coded, backend=TorchWeights()), 128, "fp32"), INPUTS, 9
    )
    np.testing.assert_allclose(np.concatenate(widened), exact, atol=1e-4 * exact.std())
    assert load_model(coded, quantize="int8").quantize == "int8"


def test_mxfp4_takes_no_more_memory_than_the_file(tmp_path: Path) -> None:
    source = cached_checkpoint("gpt_oss")
    tensors = load_file(source / "model.safetensors")
    num_coded = 0
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, num_inputs, num_outputs = tensors.pop(name).shape
        shape = num_experts, num_outputs, num_inputs // 32
        tensors[f"{name}_blocks"] = np.zeros((*shape, 16), np.uint8)
        tensors[f"{name}_scales"] = np.full(shape, 122, np.uint8)
        num_coded += tensors[f"{name}_blocks"].nbytes + tensors[f"{name}_scales"].nbytes
    path = write(tmp_path / "coded", source, tensors, quantization_config={"quant_method": "mxfp4"})
    model = load_model(path)
    held = sum(
        linear.weight.num_bytes
        for layer in model.weights.layers
        if layer.experts is not None
        for linear in (layer.experts.gate_up, layer.experts.down)
    )
    assert model.quantize == "mxfp4"
    assert held <= 1.1 * num_coded
    damaged = next(name for name in tensors if name.endswith("_scales"))
    tensors[damaged] = np.full_like(tensors[damaged], 255)
    settings = {"quantization_config": {"quant_method": "mxfp4"}}
    with pytest.raises(ModelError, match="a scale of MXFP4 weights is 255"):
        load_model(write(tmp_path / "damaged", source, tensors, **settings))


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    source = cached_checkpoint("glm4_moe")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.3.eh_proj.weight"] = np.zeros((64, 128), np.float32)
    further = write(tmp_path / "further", source, tensors, num_nextn_predict_layers=1)
    np.testing.assert_array_equal(logits_of(further), logits_of(source))
    with pytest.raises(ModelError, match=r"unexpected: model\.layers\.3\.eh_proj"):
        load_model(write(tmp_path / "none", source, tensors, num_nextn_predict_layers=0))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"n_group": 5}, "n_group is 5, which doesn't divide 12 experts"),
        ({"topk_group": 9}, "topk_group is 9, but there are 4 groups"),
        (
            {"topk_group": 1, "num_experts_per_tok": 4},
            "num_experts_per_tok is 4, but 1 of 4 groups have 3 experts each",
        ),
    ],
)
def test_groups_that_experts_cannot_come_from(
    settings: dict[str, int], problem: str, tmp_path: Path
) -> None:
    path = make_checkpoint(tmp_path, "deepseek_v3", tokenizer=False)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | settings))
    with pytest.raises(ModelError, match=problem):
        load_model(path)


def test_adapters_of_experts_are_refused_by_name(tmp_path: Path) -> None:
    source = cached_checkpoint("qwen3_moe")
    module = "base_model.model.model.layers.0.mlp.experts.3.up_proj"
    tensors = {
        f"{module}.lora_A.weight": np.zeros((4, 64), np.float32),
        f"{module}.lora_B.weight": np.zeros((48, 4), np.float32),
    }
    adapter = write_adapter(tmp_path / "adapter", tensors, rank=4)
    with pytest.raises(ModelError, match=r"experts\.3\.up_proj: adapters of a mixture's experts"):
        check_adapter_fits(adapter, load_model(source).spec, max_rank=8)
