"""Checkpoints with fp8 matrices, in the forms that are found, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import make_checkpoint

CONFIGS: dict[str, dict[str, Any]] = {
    "tensor": {"quant_method": "fp8", "activation_scheme": "static"},
    "row": {"quant_method": "fp8"},
    "block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "compressed": {"quant_method": "compressed-tensors", "format": "float-quantized"},
}
INPUT_SCALES = {"q_proj": 0.03, "v_proj": 0.05, "up_proj": 0.02}
"""Of activations, where ``activation_scheme`` is static; 0.04: of others."""
BLOCK = 128
Exact = dict[str, npt.NDArray[np.float32]]


def make_fp8_checkpoint(
    directory: Path, form: str, variant: str = "llama2", **config: Any
) -> tuple[Path, Exact]:
    """Write a bf16 checkpoint whose layers' matrices are in fp8; what these stand for, by name."""
    shape = {"hidden_size": 192, "intermediate_size": 320, **config}
    make_checkpoint(directory, variant, dtype="bfloat16", **shape)
    tensors: dict[str, Tensor] = {}
    exact: Exact = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        tensors[name] = tensor
        if name.endswith("proj.weight"):
            tensors |= _in_fp8(name, tensor.float(), form)
            exact[name] = _exact(name, tensors).numpy()
    save_file(tensors, directory / "model.safetensors")
    path = directory / "config.json"
    settings = json.loads(path.read_text()) | {"quantization_config": CONFIGS[form]}
    path.write_text(json.dumps(settings))
    return directory, exact


def _in_fp8(name: str, matrix: Tensor, form: str) -> dict[str, Tensor]:
    outputs, inputs = matrix.shape
    height, width = {
        "tensor": (outputs, inputs),
        "row": (1, inputs),
        "compressed": (1, inputs),
        "block": (BLOCK, BLOCK),
    }[form]
    rows, columns = -(-outputs // height), -(-inputs // width)
    scales = torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            part = matrix[row * height : (row + 1) * height, column * width : (column + 1) * width]
            scales[row, column] = part.abs().max() / 448
    codes = (matrix / _spread(scales, matrix.shape, height, width)).to(torch.float8_e4m3fn)
    prefix = name.removesuffix("weight")
    if form == "block":
        return {name: codes, f"{prefix}weight_scale_inv": scales}
    if form == "tensor":
        return {
            name: codes,
            f"{prefix}weight_scale": scales.reshape(()),
            f"{prefix}input_scale": torch.tensor(INPUT_SCALES.get(name.split(".")[-2], 0.04)),
        }
    return {name: codes, f"{prefix}weight_scale": scales.bfloat16() if form != "row" else scales}


def _exact(name: str, tensors: dict[str, Tensor]) -> Tensor:
    codes = tensors[name].float()
    scales = tensors.get(f"{name}_scale")
    if scales is None:
        return codes * _spread(tensors[f"{name}_scale_inv"], codes.shape, BLOCK, BLOCK)
    return codes * scales.float()


def _spread(scales: Tensor, shape: torch.Size, height: int, width: int) -> Tensor:
    spread = scales.repeat_interleave(height, 0).repeat_interleave(width, 1)
    return spread[: shape[0], : shape[1]]
