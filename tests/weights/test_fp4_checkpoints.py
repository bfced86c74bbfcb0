"""Checkpoints in NVFP4 and MXFP4: read as their tools mean them, and refused by name if damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)
safetensors_torch = pytest.importorskip("safetensors.torch")

from lmi_core.errors import ModelError  # noqa: E402
from lmi_core.models.found_model import find_model  # noqa: E402
from lmi_core.ops.cpu import NativeWeights  # noqa: E402
from lmi_core.runners.cpu.memory_needs import estimate  # noqa: E402
from lmi_core.settings.engine_config import EngineConfig  # noqa: E402
from tests.checkpoints import cached_checkpoint  # noqa: E402
from tests.loading import load_model  # noqa: E402
from tests.models.forward import NativeForward, all_logits  # noqa: E402

NVFP4 = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
MXFP4 = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}
FORMS = {"nvfp4": NVFP4, "mxfp4": MXFP4, "modelopt": MODELOPT}
VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
VALUES = torch.cat([VALUES, -VALUES])
LAYER = "model.layers.0.mlp.down_proj"


def coded(form: str, shape: tuple[int, int], seed: int) -> tuple[dict[str, Any], Any]:
    """Random tensors of a layer, and the weights that they stand for."""
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, shape, generator=random)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    block = 32 if form == "mxfp4" else 16
    blocks = (shape[0], shape[1] // block)
    if form == "mxfp4":
        scales = torch.randint(119, 124, blocks, generator=random, dtype=torch.uint8)
        floats = torch.exp2(scales.float() - 127)
        tensors = {"weight_packed": packed, "weight_scale": scales}
    else:
        scales = (torch.rand(blocks, generator=random) * 200 + 30).to(torch.float8_e4m3fn)
        whole = torch.tensor([2048.0 + seed])
        floats = scales.float() / whole
        tensors = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": whole}
        if form == "modelopt":
            tensors = {"weight": packed, "weight_scale": scales, "weight_scale_2": 1 / whole[0]}
            tensors["input_scale"] = torch.tensor(0.5)
    return tensors, VALUES[codes] * floats.repeat_interleave(block, 1)


def make(directory: Path, form: str, *, in_old_file: bool = False, **changes: Any) -> Path:
    """A checkpoint with its layers in ``form``; beside it ``plain``, the same weights in fp32."""
    source = cached_checkpoint("llama3")
    tensors = safetensors_torch.load_file(source / "model.safetensors")
    plain = dict(tensors)
    linears = [n for n, t in tensors.items() if n.startswith("model.layers") and t.ndim == 2]
    for seed, name in enumerate(sorted(linears)):
        made, weights = coded(form, tuple(tensors.pop(name).shape), seed)
        plain[name] = weights
        tensors |= {name.removesuffix("weight") + suffix: each for suffix, each in made.items()}
    tensors |= {f"{LAYER}.{suffix}": tensor for suffix, tensor in changes.items()}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    config = json.loads((source / "config.json").read_text())
    for path, what in ((directory / "model", tensors), (directory / "plain", plain)):
        path.mkdir(parents=True)
        (path / "tokenizer.json").symlink_to(source / "tokenizer.json")
        safetensors_torch.save_file(
            {k: v.contiguous() for k, v in what.items()}, path / "model.safetensors"
        )
        (path / "config.json").write_text(json.dumps(config))
    settings = dict(FORMS[form])
    if in_old_file:
        del settings["quant_method"]
        text = json.dumps({"producer": {"name": "modelopt"}, "quantization": settings})
        (directory / "model" / "hf_quant_config.json").write_text(text)
    else:
        config["quantization_config"] = settings
        (directory / "model" / "config.json").write_text(json.dumps(config))
    return directory / "model"


def logits(path: Path, **settings: Any) -> np.ndarray:
    sequence = list(range(20, 60))
    model = load_model(path, "fp32", **settings)
    return all_logits(NativeForward(model, 64, "fp32"), [sequence], max_chunk=64)[0]


@pytest.mark.parametrize(
    ("form", "in_old_file"),
    [("nvfp4", False), ("mxfp4", False), ("modelopt", False), ("modelopt", True)],
)
def test_weights_are_the_formats_own(form: str, in_old_file: bool, tmp_path: Path) -> None:
    path = make(tmp_path, form, in_old_file=in_old_file)
    found = logits(path, packer=NativeWeights(activations="bf16"))
    np.testing.assert_allclose(found, logits(tmp_path / "plain"), rtol=1e-3, atol=1e-3)
    if form == "mxfp4":
        assert load_model(path).quantize == "mxfp4"
        return
    model = find_model(EngineConfig(model=path))
    assert "weights are widened when they are loaded" in " ".join(model.notes)
    plain = find_model(EngineConfig(model=tmp_path / "plain"))
    weights = [estimate(f).weights for f in (model, plain)]
    assert weights[0] == weights[1]


def test_they_may_be_quantised_anew(tmp_path: Path) -> None:
    path = make(tmp_path, "nvfp4")
    exact = logits(path)
    change = logits(path, quantize="int8") - exact
    assert 0 < np.sqrt(np.mean(change**2)) < 0.1 * exact.std()


def nan_scales() -> Any:
    return torch.full((64, 6), float("nan")).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("form", "changes", "message"),
    [
        ("nvfp4", {"weight_scale": None}, r"missing: .*down_proj.weight_scale \[64, 6\]"),
        ("nvfp4", {"weight_global_scale": None}, r"missing: .*weight_global_scale \[1\]"),
        ("nvfp4", {"weight_global_scale": torch.zeros(1)}, "global_scale is 0.0, but must be a"),
        ("modelopt", {"weight_scale_2": torch.tensor(float("inf"))}, "weight_scale_2 is inf, but"),
        ("nvfp4", {"weight_scale": nan_scales()}, "weight_scale holds a scale that is NaN"),
        ("nvfp4", {"weight_scale": torch.ones(64, 6)}, "weight_scale is F32, must be F8_E4M3"),
        (
            "nvfp4",
            {"weight_packed": torch.zeros(64, 47).byte()},
            r"is \[64, 47\], expected \[64, 4",
        ),
        ("mxfp4", {"weight_scale": torch.zeros(64, 6).byte()}, r"is \[64, 6\], expected \[64, 3\]"),
    ],
)
def test_faults_name_the_tensor(
    form: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(make(tmp_path, form, **changes))
