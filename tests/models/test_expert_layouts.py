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
from lmi_core.models.loader import load_model
from lmi_core.weights.mxfp4 import decode_mxfp4
from tests.checkpoints import cached_checkpoint, make_checkpoint
from tests.lora_adapters import write_adapter
from tests.models.forward import NativeForward, all_logits

pytest.importorskip("torch")

Tensors = dict[str, npt.NDArray[np.generic]]
INPUTS = [list(range(4, 60)), [7, 300, 200]]


def logits_of(path: Path) -> npt.NDArray[np.float32]:
    forward = NativeForward(load_model(path), 128, "fp32")
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
    np.testing.assert_array_equal(logits_of(coded), logits_of(plain))
    assert load_model(coded, quantize="int8").quantize == "int8"


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
