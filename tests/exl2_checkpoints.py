"""EXL2 checkpoints made of random codes, from the layout alone: nothing writes one on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import cached_checkpoint

WIDTHS = (8, 6, 5, 4, 3, 2)
GROUP = 32


def coded(shape: tuple[int, int], seed: int) -> tuple[dict[str, Any], Any]:
    """A layer's tensors, with a group of inputs for each of some widths, and its weights."""
    num_outputs, num_inputs = shape
    random = np.random.default_rng(seed)
    columns = -(-num_outputs // 32) * 32
    num_groups = -(-num_inputs // GROUP)
    chosen = sorted((WIDTHS[(seed + i) % len(WIDTHS)] for i in range(num_groups)), reverse=True)
    order = random.permutation(num_inputs)
    indices = random.integers(0, 16, (num_groups, columns))
    most = random.uniform(0.02, 0.06, num_groups).astype(np.float16)
    rows, words, groups = [], [], []
    for i, bits in enumerate(chosen):
        codes = random.integers(0, 1 << bits, (min(GROUP, num_inputs - i * GROUP), columns))
        groups += [bits, sum(map(len, words))]
        words.append(_stream(codes, bits))
        scales = ((indices[i] + 1) ** 2).astype(np.float16) * (most[i] / np.float16(256))
        rows.append((codes - (1 << (bits - 1))) * scales.astype(np.float32))
    packed = np.concatenate(rows)
    nibbles = sum(indices[:, i::8].astype(np.uint32) << np.uint32(4 * i) for i in range(8))
    tensors = {
        "q_weight": torch.from_numpy(np.concatenate(words).view(np.int32)),
        "q_invperm": torch.from_numpy(order.astype(np.int32)),
        "q_scale": torch.from_numpy(np.ascontiguousarray(nibbles).view(np.int32)),
        "q_scale_max": torch.from_numpy(most),
        "q_groups": torch.from_numpy(np.array(groups, np.int16)),
    }
    weights = packed[order][:, :num_outputs].T.astype(np.float32)
    return tensors, torch.from_numpy(np.ascontiguousarray(weights))


def _stream(codes: np.ndarray, bits: int) -> np.ndarray:
    """Each column's codes one behind the other, the lowest bit first, in words."""
    as_bits = (codes[:, None, :] >> np.arange(bits)[None, :, None] & 1).reshape(-1, codes.shape[1])
    whole = np.zeros((-(-len(as_bits) // 32) * 32, codes.shape[1]), np.uint32)
    whole[: len(as_bits)] = as_bits
    places = np.uint32(1) << np.arange(32, dtype=np.uint32)
    return (whole.reshape(-1, 32, codes.shape[1]) * places[None, :, None]).sum(1, dtype=np.uint32)


def make_exl2_checkpoint(directory: Path, **changes: Any) -> Path:
    """A Llama whose linears, the head too, are in EXL2; beside it ``plain``, the same in fp32.
    ``changes``: tensors of one layer."""
    source = cached_checkpoint("llama3")
    tensors = load_file(source / "model.safetensors")
    plain = dict(tensors)
    names = [n for n, t in tensors.items() if t.ndim == 2 and "embed" not in n]
    for seed, name in enumerate(sorted(names)):
        made, plain[name] = coded(tuple(tensors.pop(name).shape), seed)
        tensors |= {name.removesuffix("weight") + suffix: each for suffix, each in made.items()}
    layer = "model.layers.0.mlp.down_proj."
    tensors |= {layer + suffix: tensor for suffix, tensor in changes.items()}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    config = json.loads((source / "config.json").read_text())
    settings = {"quantization_config": {"quant_method": "exl2", "bits": 4.0}}
    for path, what, more in (
        (directory / "model", tensors, settings),
        (directory / "plain", plain, {}),
    ):
        path.mkdir(parents=True)
        (path / "tokenizer.json").symlink_to(source / "tokenizer.json")
        whole = {name: tensor.contiguous() for name, tensor in what.items()}
        save_file(whole, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(config | more))
    return directory / "model"
