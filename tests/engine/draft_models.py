"""Draft models for tests: a checkpoint's first layers, and settings that draft by one."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from lmi_core.settings.speculation_config import SpeculationConfig
from tests.checkpoints import cached_checkpoint


@functools.cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="lmi-draft-models-")


@functools.cache
def first_layers(variant: str, dtype: str, num_layers: int) -> Path:
    """What is left of a cached checkpoint of a Llama shape without its last layers."""
    source = cached_checkpoint(variant, dtype=dtype)
    config = json.loads((source / "config.json").read_text())
    removed = tuple(
        f"model.layers.{i}." for i in range(num_layers, int(config["num_hidden_layers"]))
    )
    tensors = {k: v for k, v in _tensors(source).items() if not k.startswith(removed)}
    for key in ("layer_types", "max_window_layers"):
        config.pop(key, None)
    config["num_hidden_layers"] = num_layers
    return _write(f"{variant}-{dtype}-{num_layers}", source, tensors, config)


@functools.cache
def near_copy(variant: str, dtype: str, noise: float = 0.03) -> Path:
    """A cached checkpoint with noise, as a part of their deviation, in its matrices."""
    import torch

    source = cached_checkpoint(variant, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: tensor
        + noise * tensor.std() * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        if tensor.ndim > 1
        else tensor
        for name, tensor in _tensors(source).items()
    }
    return _write(f"{variant}-{dtype}-near", source, tensors)


def _tensors(directory: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


def _write(
    name: str, source: Path, tensors: dict[str, Any], config: dict[str, Any] | None = None
) -> Path:
    from safetensors.torch import save_file

    path = Path(_root().name) / name
    shutil.copytree(source, path)
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


def drafted_by(model: Path, num_tokens: int = 4) -> SpeculationConfig:
    return SpeculationConfig(
        draft_model=model, max_draft_tokens=num_tokens, min_match=64, max_match=64
    )
