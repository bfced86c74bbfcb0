"""Checkpoints with a NaN or an infinity: refused while they are loaded, by name and place."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmi_core import _native
from lmi_core.errors import ModelError
from lmi_core.models import tensor_reader
from lmi_core.runners.cpu.cpu_runner import load_cpu_runner
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.weights import repack_cache
from tests.checkpoints import cached_checkpoint

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

LAYER = "model.layers.1."
DOWN = f"{LAYER}mlp.down_proj.weight"


def load(path: Path, **settings: Any) -> None:
    settings = {"repack_cache_dir": "none", "kv_cache_bytes": 1 << 20, **settings}
    runner, _ = load_cpu_runner(EngineConfig(model=path, num_threads=2, **settings))
    for packed in runner._packed:
        packed.wait()
    runner.close()


def damaged(target: Path, name: str, value: float, *, variant: str, dtype: str) -> Path:
    """A checkpoint that has ``value`` among the numbers of one tensor, in its last row."""
    path = shutil.copytree(cached_checkpoint(variant, dtype=dtype), target)
    tensors = safetensors_torch.load_file(path / "model.safetensors")
    tensors[name].view(-1)[-2] = value
    safetensors_torch.save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize(
    ("name", "value", "variant", "dtype", "settings"),
    [
        ("model.embed_tokens.weight", "nan", "llama2", "bfloat16", {}),
        ("lm_head.weight", "inf", "llama2", "float32", {}),
        ("model.norm.weight", "nan", "llama2", "float32", {}),
        (f"{LAYER}self_attn.k_proj.weight", "-inf", "llama2", "bfloat16", {}),
        (f"{LAYER}mlp.up_proj.weight", "nan", "llama2", "float16", {}),
        (DOWN, "inf", "llama2", "float16", {"quantize": "int4"}),
        (DOWN, "nan", "llama2", "bfloat16", {"quantize": "int8"}),
        (DOWN, "nan", "llama2", "float32", {"quantize": "eetq"}),
        (DOWN, "nan", "llama2", "float32", {"quantize": "bitsandbytes"}),
        (DOWN, "nan", "llama2", "bfloat16", {"quantize": "fp8"}),
        (DOWN, "nan", "llama2", "bfloat16", {"dtype": "fp32"}),
    ],
)
def test_a_tensor_that_is_not_finite_is_named(
    tmp_path: Path, name: str, value: str, variant: str, dtype: str, settings: dict[str, Any]
) -> None:
    path = damaged(tmp_path / "m", name, float(value), variant=variant, dtype=dtype)
    shape = safetensors_torch.load_file(path / "model.safetensors")[name].shape
    place = [size - 1 for size in shape]
    place[-1] -= 1
    with pytest.raises(ModelError) as caught:
        load(path, **settings)
    message = f"model.safetensors: {name} holds {value} at {place}; it is damaged"
    assert str(caught.value).endswith(message)


def test_an_expert_that_is_not_finite_is_named(tmp_path: Path) -> None:
    path = cached_checkpoint("mixtral", dtype="bfloat16")
    tensors = safetensors_torch.load_file(path / "model.safetensors")
    name = next(n for n in tensors if "experts" in n and n.startswith(LAYER))
    path = damaged(tmp_path / "m", name, float("nan"), variant="mixtral", dtype="bfloat16")
    with pytest.raises(ModelError, match=f"{name} holds nan at"):
        load(path)


def test_torch_devices_refuse_it_too(tmp_path: Path) -> None:
    from lmi_core.ops.device.torch_weights import DeviceWeights
    from tests.loading import load_model

    path = damaged(tmp_path / "m", DOWN, float("nan"), variant="llama2", dtype="bfloat16")
    for quantize in (None, "int8"):
        with pytest.raises(ModelError, match=f"{DOWN} holds nan at"):
            load_model(path, packer=DeviceWeights(torch.device("cpu")), quantize=quantize)


def test_what_was_packed_before_is_not_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repack_cache, "MIN_CHECKPOINT_BYTES", 0)
    seen: list[str] = []
    monkeypatch.setattr(tensor_reader, "check_finite", lambda tensor, _: seen.append(tensor.name))
    path = shutil.copytree(cached_checkpoint("llama2"), tmp_path / "m")
    for first in (True, False):
        seen.clear()
        load(path, repack_cache_dir=str(tmp_path / "cache"))
        assert ("model.embed_tokens.weight" in seen) is first
        assert "model.norm.weight" in seen


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_place_of_an_array_is_looked_at(dtype: str) -> None:
    for size in (1, 7, 8, 63, 200):
        values = torch.full((size,), torch.finfo(getattr(torch, dtype)).max)
        for place in (0, size // 2, size - 1):
            for number in (float("nan"), float("inf"), float("-inf"), -float(values[0])):
                other = values.clone()
                other[place] = number
                stored = other.to(getattr(torch, dtype))
                array = stored.view(torch.uint16) if dtype == "bfloat16" else stored
                assert _native.is_finite(array.numpy()) == bool(np.isfinite(number))
