"""How checkpoints hold mixtures of experts, and what is beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

from lmi_core.adapters.adapter import check_adapter_fits
from lmi_core.errors import ModelError
from lmi_core.models.loader import LoadedModel
from lmi_core.ops.cpu import NativeWeights
from lmi_core.weights.mxfp4 import decode_mxfp4
from tests.checkpoints import cached_checkpoint, make_checkpoint
from tests.integer_checkpoints import FORMS, quantize
from tests.loading import load_model
from tests.lora_adapters import write_adapter
from tests.models.forward import NativeForward, TorchForward, all_logits
from tests.ops.torch_store import TorchWeights

torch = pytest.importorskip("torch")
save_torch_file = pytest.importorskip("safetensors.torch").save_file
from lmi_core.ops.device.quantized_rows import StaticFp8  # noqa: E402
from lmi_core.ops.device.torch_weights import DeviceWeights  # noqa: E402
from lmi_core.ops.operands import ExpertMatrices  # noqa: E402

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
    tensors = merged_experts(source)
    merged = write(tmp_path / "merged", source, tensors)
    np.testing.assert_array_equal(logits_of(merged), logits_of(source))


def merged_experts(source: Path) -> Tensors:
    """Qwen3-MoE's tensors as newer tools write them."""
    tensors = load_file(source / "model.safetensors")
    for layer in (0, 2):
        prefix = f"model.layers.{layer}.mlp.experts"
        parts = {
            part: np.stack([tensors.pop(f"{prefix}.{i}.{part}_proj.weight") for i in range(8)])
            for part in ("gate", "up", "down")
        }
        tensors[f"{prefix}.gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], axis=1)
        tensors[f"{prefix}.down_proj"] = parts["down"]
    return tensors


def in_fp8(weights: npt.NDArray[Any], form: str) -> tuple[Any, Any, npt.NDArray[np.float32]]:
    """Several matrices' codes, their scales in ``form``, and what they stand for."""
    count, num_outputs, num_inputs = weights.shape
    shape = {
        "whole": (1,),
        "expert": (count, 1, 1),
        "row": (count, num_outputs, 1),
        "block": (count, -(-num_outputs // 128), -(-num_inputs // 128)),
    }[form]
    random = np.random.default_rng(len(form))
    scales = random.uniform(0.01, 0.03, shape).astype(np.float32)
    spread = scales.repeat(128, 1).repeat(128, 2) if form == "block" else scales
    rows = spread[..., :num_outputs, :num_inputs] if form == "block" else spread
    codes = torch.from_numpy(weights / rows).to(torch.float8_e4m3fn)
    return codes, torch.from_numpy(scales), codes.float().numpy() * rows


@pytest.mark.parametrize("form", ["whole", "expert", "row", "block"])
def test_merged_tensors_may_be_in_fp8(form: str, tmp_path: Path) -> None:
    shape = {"hidden_size": 128, "moe_intermediate_size": 128}
    source = make_checkpoint(tmp_path / "source", "qwen3_moe", **shape)
    floats = merged_experts(source)
    coded = {name: torch.from_numpy(values) for name, values in floats.items()}
    for name in [name for name in floats if name.endswith(("gate_up_proj", "down_proj"))]:
        if floats[name].ndim == 3:
            coded[name], scales, floats[name] = in_fp8(floats[name], form)
            coded[f"{name}_scale_inv"] = scales
    coded["model.layers.0.mlp.experts.down_proj_activation_scale"] = torch.arange(1.0, 9.0)
    plain = write(tmp_path / "floats", source, floats)
    path = write(tmp_path / "fp8", source, {}, quantization_config={"quant_method": "fp8"})
    save_torch_file(coded, path / "model.safetensors")
    model, exact = load_model(path, "fp32"), load_model(plain, "fp32")
    assert model.quantize == "fp8"
    device = DeviceWeights(torch.device("cpu"))
    experts = load_model(path, "fp32", packer=device).weights.layers[0].experts
    assert experts is not None
    assert isinstance(experts.down.weight, ExpertMatrices)
    assert {weight.row_format for weight in experts.down.weight.experts} == {StaticFp8(8.0)}
    for ours, theirs in zip(model.weights.layers, exact.weights.layers, strict=True):
        if ours.experts is not None and theirs.experts is not None:
            for part in ("gate_up", "down"):
                found, wanted = (getattr(e, part).weight for e in (ours.experts, theirs.experts))
                np.testing.assert_array_equal(found.unpack(), wanted.unpack())
    wanted_logits = logits_of(exact)
    np.testing.assert_allclose(
        logits_of(model), wanted_logits, atol=1e-4 * wanted_logits.std(), rtol=0
    )


def apart(source: Path) -> Tensors:
    """gpt-oss' experts as Unsloth and GPTQModel store them: linears of their own."""
    tensors = load_file(source / "model.safetensors")
    for name in [*tensors]:
        if ".mlp.router." in name:
            tensors[name.replace("router.", "router.linear.")] = tensors.pop(name)
        elif ".mlp.experts." in name:
            values, prefix = tensors.pop(name), name.removesuffix("_bias")
            for expert, own in enumerate(values):
                part = f"{prefix}s.{expert}."
                own = own if name.endswith("_bias") else np.ascontiguousarray(own.T)
                tensors[part + ("bias" if name.endswith("_bias") else "weight")] = own
    return tensors


def test_each_expert_may_have_one_linear_for_gate_and_up(tmp_path: Path) -> None:
    source = cached_checkpoint("gpt_oss")
    floats = apart(source)
    plain = write(tmp_path / "floats", source, floats)
    np.testing.assert_array_equal(logits_of(plain), logits_of(source))
    coded = {name: torch.from_numpy(values) for name, values in floats.items()}
    form = FORMS["gptq"]
    for name in [name for name in floats if "_projs." in name and name.endswith("weight")]:
        matrix = quantize(floats[name], form)
        floats[name] = matrix.matrix
        module = name.removesuffix("weight")
        coded |= {module + suffix: each for suffix, each in form.write(matrix).items()}
        del coded[name]
    exact = load_model(write(tmp_path / "exact", source, floats))
    path = write(tmp_path / "gptq", source, {}, quantization_config=form.config)
    save_torch_file({n: t.contiguous() for n, t in coded.items()}, path / "model.safetensors")
    model = load_model(path)
    assert model.quantize == "int4"
    ours, theirs = model.weights.layers[1].experts, exact.weights.layers[1].experts
    assert ours is not None
    assert theirs is not None
    for part in ("gate_up", "down"):
        found, wanted = (getattr(each, part).weight.unpack() for each in (ours, theirs))
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("variant", "suffix", "problem"),
    [
        ("qwen3_moe", ".qweight", r"gate_up_proj\.qweight is of experts in common tensors, of whi"),
        ("qwen3_moe", "_packed", r"gate_up_proj_packed is of experts in common tensors"),
        ("gpt_oss", "_quant_state", r"gate_up_proj_quant_state is of experts in common tensors"),
        ("gpt_oss", "", r"wrong dtype: .*gate_up_proj is F8_E4M3, must be F32, F16 or BF16"),
    ],
)
def test_other_formats_of_common_tensors_are_refused(
    variant: str, suffix: str, problem: str, tmp_path: Path
) -> None:
    source = cached_checkpoint(variant)
    found = (
        merged_experts(source)
        if variant == "qwen3_moe"
        else load_file(source / "model.safetensors")
    )
    tensors = {name: torch.from_numpy(values) for name, values in found.items()}
    name = "model.layers.0.mlp.experts.gate_up_proj"
    codes = torch.zeros(4, 4, dtype=torch.int32) if suffix else tensors[name]
    codes = codes if suffix else codes.to(torch.float8_e4m3fn)
    tensors[f"{name}{suffix}"] = codes
    path = write(tmp_path / "model", source, {})
    save_torch_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelError, match=problem):
        load_model(path)


def mxfp4_experts(source: Path) -> tuple[Tensors, Tensors]:
    """The tensors of gpt-oss with other experts: as MXFP4, and as what that stands for."""
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
    return blocks, floats


def test_mxfp4_is_what_it_stands_for(tmp_path: Path) -> None:
    source = cached_checkpoint("gpt_oss")
    blocks, floats = mxfp4_experts(source)
    plain = write(tmp_path / "floats", source, floats)
    coded = write(tmp_path / "mxfp4", source, blocks, quantization_config={"quant_method": "mxfp4"})
    exact = logits_of(plain)
    as_rows_are = load_model(coded, packer=NativeWeights(activations="bf16"))
    np.testing.assert_allclose(logits_of(as_rows_are), exact, atol=1e-4 * exact.std())
    rounded = logits_of(load_model(coded)) - exact
    assert 0 < np.sqrt(np.mean(rounded**2)) < 0.05 * exact.std()
    # Devices without such products widen them, and quantising anew does so first.
    widened = all_logits(
        TorchForward(load_model(coded, packer=TorchWeights()), 128, "fp32"), INPUTS, 9
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
