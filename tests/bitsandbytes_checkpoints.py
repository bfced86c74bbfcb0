"""Checkpoints as Transformers writes them with bitsandbytes, for tests: by the definitions, a
weight at a time, sharing nothing with what reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_checkpoint
from tests.integer_checkpoints import as_linear, is_linear, set_config

Floats = npt.NDArray[np.float32]
FP4 = [0, 0.0625, 8, 12, 4, 6, 2, 3]
VALUES = {
    "nf4": np.array(
        [
            *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
            *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
            *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
            *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
        ],
        np.float32,
    ),
    "fp4": np.array([*(each / 12 for each in FP4), *(-each / 12 for each in FP4)], np.float32),
}
FORMS = ["nf4", "fp4", "nf4 twice", "int8"]
"""twice: the scales are quantised, too."""


def make_bitsandbytes_checkpoint(
    directory: Path, form: str, variant: str = "llama2", **config: Any
) -> tuple[Path, dict[str, Floats]]:
    """Write a bf16 checkpoint whose layers are quantised; what their matrices are, by name."""
    shape = {"hidden_size": 64, "intermediate_size": 128, **config}
    make_checkpoint(directory, variant, dtype="bfloat16", **shape)
    kind = form.split()[0]
    tensors: dict[str, torch.Tensor] = {}
    exact: dict[str, Floats] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if not is_linear(name):
            tensors[name] = tensor
            continue
        write = _eight_bits if kind == "int8" else _four_bits
        parts, exact[name] = write(as_linear(tensor, variant), kind, "twice" in form)
        layer = name.removesuffix("weight")
        tensors |= {layer + suffix: torch.from_numpy(part) for suffix, part in parts.items()}
    save_file({n: t.contiguous() for n, t in tensors.items()}, directory / "model.safetensors")
    settings = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": kind != "int8",
        "load_in_8bit": kind == "int8",
        "llm_int8_threshold": 6.0,
        "bnb_4bit_quant_type": "fp4" if kind == "int8" else kind,
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_use_double_quant": "twice" in form,
    }
    set_config(directory, quantization_config=settings)
    return directory, exact


def _eight_bits(weights: Floats, kind: str, twice: bool) -> tuple[dict[str, Any], Floats]:
    most = np.abs(weights).max(axis=1)
    codes = np.rint(weights * (127 / most)[:, None]).astype(np.int8)
    tensors = {"weight": codes, "SCB": most, "weight_format": np.array(0, np.uint8)}
    return tensors, codes * (most * np.float32(1 / 127))[:, None]


def _four_bits(weights: Floats, kind: str, twice: bool) -> tuple[dict[str, Any], Floats]:
    flat = np.zeros(-(-weights.size // 64) * 64, np.float32)
    flat[: weights.size] = weights.ravel()
    blocks = flat.reshape(-1, 64)
    scales = np.abs(blocks).max(axis=1)
    codes = np.abs((blocks / scales[:, None])[:, :, None] - VALUES[kind]).argmin(axis=2)
    state: dict[str, Any] = {
        "quant_type": kind,
        "blocksize": 64,
        "dtype": "bfloat16",
        "shape": [*weights.shape],
    }
    tensors: dict[str, Any] = {"weight.absmax": scales}
    if twice:
        tensors, scales, offset = _in_8_bits(scales)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    pairs = codes.ravel()[: weights.size + weights.size % 2].astype(np.uint8)
    tensors["weight"] = (pairs[0::2] << 4 | pairs[1::2])[:, None]
    tensors["weight.quant_map"] = VALUES[kind].copy()
    text = json.dumps(state).encode()
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = np.frombuffer(text, np.uint8).copy()
    exact = (VALUES[kind][codes] * scales[:, None]).ravel()[: weights.size]
    return tensors, exact.reshape(weights.shape)


def _in_8_bits(scales: Floats) -> tuple[dict[str, Any], Floats, float]:
    """Blocks of 256, coded by any map of 256 numbers."""
    values = np.linspace(-1, 1, 256).astype(np.float32)
    offset = float(scales.mean())
    blocks = np.zeros(-(-len(scales) // 256) * 256, np.float32)
    blocks[: len(scales)] = scales - np.float32(offset)
    blocks = blocks.reshape(-1, 256)
    most = np.abs(blocks).max(axis=1)
    codes = np.abs((blocks / most[:, None])[:, :, None] - values).argmin(axis=2).astype(np.uint8)
    exact = (values[codes] * most[:, None] + np.float32(offset)).ravel()[: len(scales)]
    tensors = {
        "weight.absmax": codes.ravel()[: len(scales)],
        "weight.nested_absmax": most,
        "weight.nested_quant_map": values,
    }
    return tensors, exact, offset
