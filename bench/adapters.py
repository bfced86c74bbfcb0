"""Random LoRA adapters for the benchmarks' checkpoints, of every linear of a layer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from bench.checkpoints import Shape, tensors_of


def write_adapter(shape: Shape, rank: int, directory: Path) -> Path:
    """A PEFT directory whose adapter has the scale 1."""
    rng = np.random.default_rng(rank)
    tensors = {}
    for name, size in tensors_of(shape).items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj"):
            continue
        num_outputs, num_inputs = size
        for matrix, matrix_size in (("A", (rank, num_inputs)), ("B", (num_outputs, rank))):
            values = rng.standard_normal(matrix_size, np.float32)
            scale = np.float32(matrix_size[1] ** -0.5)
            tensors[f"base_model.model.{module}.lora_{matrix}.weight"] = values * scale
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (directory / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory
