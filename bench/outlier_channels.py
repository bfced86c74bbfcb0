"""The embedded model with outlier channels: the same function by other weights.

Channels after every norm are made ``s`` times larger, and the next matrices' columns as much
smaller, which leaves the fp32 model as it is.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.torch import load_file, save_file
from torch import Tensor

from lmi_core.demo import MODEL_DIR

NUM_CHANNELS = 6
READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


def rescale(tensors: dict[str, Tensor], scale: float, *, is_down: bool) -> dict[str, Tensor]:
    """The same function with larger channels, in fp32, the head beside the embedding."""
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    random = np.random.default_rng(6)
    for name, readers in _scaled_by_norms(tensors):
        channels = random.choice(len(tensors[name]), NUM_CHANNELS, replace=False)
        tensors[name][channels] *= scale
        for reader in readers:
            tensors[reader][:, channels] /= scale
    if is_down:
        for up in [name for name in tensors if name.endswith("up_proj.weight")]:
            channels = random.choice(len(tensors[up]), NUM_CHANNELS, replace=False)
            tensors[up][channels] *= scale
            tensors[up.replace("up_proj", "down_proj")][:, channels] /= scale
    return tensors


def _scaled_by_norms(tensors: dict[str, Tensor]) -> Iterator[tuple[str, tuple[str, ...]]]:
    for name in sorted(tensors):
        layer, _, kind = name.removesuffix(".weight").rpartition(".")
        if kind in READERS:
            yield name, tuple(f"{layer}.{reader}.weight" for reader in READERS[kind])
    yield "model.norm.weight", ("lm_head.weight",)


def write_model(directory: Path, scale: float, *, is_down: bool) -> Path:
    """A checkpoint of ``rescale``."""
    path = directory / f"{scale:g}{'-down' * is_down}"
    shutil.copytree(MODEL_DIR, path)
    tensors = load_file(path / "model.safetensors")
    save_file(rescale(tensors, scale, is_down=is_down), path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config |= {"tie_word_embeddings": False, "torch_dtype": "float32"}
    (path / "config.json").write_text(json.dumps(config))
    return path
