"""Random LoRA adapters in PEFT's format for the checkpoints of ``tests.checkpoints``, and models
with an adapter merged into their weights."""

from __future__ import annotations

import functools
import json
import math
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from tests.checkpoints import cached_checkpoint

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Tensors = dict[str, npt.NDArray[Any]]


def adapter_tensors(
    model: Path,
    *,
    rank: int = 8,
    targets: Iterable[str] = TARGETS,
    layers: Iterable[int] | None = None,
    seed: int = 0,
    ranks: Mapping[str, int] | None = None,
) -> Tensors:
    """A and B of the modules whose names end in ``targets``, of ``layers`` or all, such that B A x
    with the scale 1 is about half as large as the module's own result. Experts, which take none,
    are left out. ``ranks``: of modules whose rank is another."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        parts = module.split(".")
        is_wanted = parts[-1] in targets and (layers is None or int(parts[2]) in layers)
        is_expert = ".experts." in name or ".shared_expert." in name
        if not is_wanted or not name.endswith(".weight") or is_expert:
            continue
        own_rank = (ranks or {}).get(module, rank)
        num_outputs, num_inputs = _as_linear(model, weight).shape
        a = rng.standard_normal((own_rank, num_inputs)) / math.sqrt(num_inputs)
        b = rng.standard_normal((num_outputs, own_rank)) / math.sqrt(4 * own_rank)
        prefix = f"base_model.model.{module}"
        tensors[f"{prefix}.lora_A.weight"] = a.astype(np.float32)
        tensors[f"{prefix}.lora_B.weight"] = b.astype(np.float32)
    return tensors


def write_adapter(
    directory: Path, tensors: Tensors, *, rank: int = 8, alpha: float = 8, **config: Any
) -> Path:
    """A PEFT directory; ``config``: further keys of adapter_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        "bias": "none",
        "modules_to_save": None,
        "use_dora": False,
        "init_lora_weights": True,
        "fan_in_fan_out": False,
        **config,
    }
    (directory / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return directory


def merge(model: Path, adapter: Tensors, scale: Mapping[str, float] | float, target: Path) -> Path:
    """A copy of an fp32 checkpoint whose weights are W + scale B A; ``scale`` may be by module."""
    shutil.copytree(model, target)
    weights = load_file(model / "model.safetensors")
    for name, b in adapter.items():
        if not name.endswith(".lora_B.weight"):
            continue
        module = name.removeprefix("base_model.model.").removesuffix(".lora_B.weight")
        a = adapter[name.replace("lora_B", "lora_A")]
        own_scale = scale if isinstance(scale, int | float) else scale[module]
        weight = weights[f"{module}.weight"]
        delta = own_scale * (b.astype(np.float64) @ a.astype(np.float64))
        weights[f"{module}.weight"] = (weight + _as_linear(model, delta)).astype(np.float32)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _as_linear(model: Path, weight: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """From the checkpoint's order to [outputs, inputs], or back: GPT-2 has matrices transposed."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return weight.T if config["model_type"] == "gpt2" else weight


@functools.cache
def cached_adapter(
    variant: str, seed: int = 0, *, rank: int = 8, targets: tuple[str, ...] = TARGETS
) -> Path:
    """An adapter with the scale 1 for a cached checkpoint; it must not be written to."""
    directory = Path(_temporary_directory().name) / f"{variant}-{seed}-{rank}-{'-'.join(targets)}"
    tensors = adapter_tensors(cached_checkpoint(variant), rank=rank, seed=seed, targets=targets)
    return write_adapter(directory, tensors, rank=rank, alpha=rank)


@functools.cache
def _temporary_directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="lmi-adapters-")
