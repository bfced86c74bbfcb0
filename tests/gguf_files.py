"""GGUF files for tests, written from their format alone: nothing here is what reads them.

Format: ggml's document on GGUF; llama.cpp's converters for names and the order of rows.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

TYPE_IDS = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10,
    "Q3_K": 11, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "IQ4_NL": 20, "IQ4_XS": 23, "BF16": 30,
    "MXFP4": 39,
}  # fmt: skip
BLOCKS = {
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34),
    "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176),
    "Q6_K": (256, 210), "IQ4_NL": (32, 18), "IQ4_XS": (256, 136), "MXFP4": (32, 17),
}  # fmt: skip
SCALE_HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
    "MXFP4": (),
}  # fmt: skip
"""Where in a block fp16 numbers are."""
Stored = tuple[str, tuple[int, ...], npt.NDArray[np.generic]]
"""Type, shape, and the bytes or numbers as they are stored."""


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Stored], alignment: int = 32
) -> Path:
    """A file of version 3."""
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts += [_string(key), _value(value)]
    offset, data = 0, []
    for name, (kind, shape, values) in tensors.items():
        raw = np.ascontiguousarray(values).tobytes()
        parts += [_string(name), struct.pack("<I", len(shape))]
        parts += [struct.pack(f"<{len(shape)}Q", *reversed(shape))]
        parts += [struct.pack("<IQ", TYPE_IDS[kind], offset)]
        raw += bytes(-len(raw) % alignment)
        data.append(raw)
        offset += len(raw)
    header = b"".join(parts)
    path.write_bytes(header + bytes(-len(header) % alignment) + b"".join(data))
    return path


def random_blocks(
    kind: str, num_rows: int, num_inputs: int, rng: np.random.Generator, scale: float = 0.01
) -> npt.NDArray[np.uint8]:
    """Rows [rows, bytes] of any codes, with scales of about ``scale``."""
    block_inputs, block_bytes = BLOCKS[kind]
    num_blocks = num_inputs // block_inputs
    blocks = rng.integers(0, 256, (num_rows, num_blocks, block_bytes), np.uint8)
    for at in SCALE_HALVES[kind]:
        halves = (scale * rng.uniform(0.5, 1.5, (num_rows, num_blocks, 1))).astype(np.float16)
        blocks[:, :, at : at + 2] = halves.view(np.uint8)
    if kind == "MXFP4":
        blocks[:, :, 0] = rng.integers(120, 126, (num_rows, num_blocks))
    return blocks.reshape(num_rows, -1)


def quantize_q8_0(weights: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Rows of blocks: codes to the nearest of 255 steps up to a block's largest weight."""
    blocks = weights.reshape(len(weights), -1, 32)
    scales = (np.abs(blocks).max(axis=2, keepdims=True) / 127).astype(np.float16)
    steps = np.where(scales == 0, np.float16(1), scales).astype(np.float32)
    codes = np.clip(np.rint(blocks / steps), -127, 127).astype(np.int8)
    return np.concatenate([scales.view(np.uint8), codes.view(np.uint8)], 2).reshape(len(blocks), -1)


def stored(weights: npt.NDArray[np.float32], kind: str) -> Stored:
    """``weights`` as the types that this module can make."""
    if kind == "F32" or weights.ndim == 1:
        return "F32", weights.shape, weights.astype(np.float32)
    if kind == "F16":
        return kind, weights.shape, weights.astype(np.float16)
    if kind == "BF16":
        bits = weights.astype(np.float32).view(np.uint32)
        return kind, weights.shape, ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    assert kind == "Q8_0"
    return kind, weights.shape, quantize_q8_0(weights)


def llama_tensors(directory: Path, kind: str) -> dict[str, Stored]:
    """Those of a Llama in safetensors as a converter stores them, matrices in ``kind``."""
    from safetensors.torch import load_file

    config = json.loads((directory / "config.json").read_text())
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "model.layers": "blk",
    }
    tensors = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        weights = tensor.float().numpy()
        for heads, module in (("num_attention_heads", "q_proj"), ("num_key_value_heads", "k_proj")):
            if module in name:
                weights = interleaved(weights, config[heads])
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        tensors[name] = stored(np.ascontiguousarray(weights), kind)
    return tensors


def llama_metadata(directory: Path, *, pre: str = "gpt-2", **more: Any) -> dict[str, Any]:
    """Settings and tokenizer (byte-level BPE) of a Llama in safetensors."""
    config = json.loads((directory / "config.json").read_text())
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return {
        "general.architecture": "llama",
        "general.name": "test",
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.block_count": config["num_hidden_layers"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.key_length": head_dim,
        "llama.attention.value_length": head_dim,
        "llama.rope.dimension_count": head_dim,
        "llama.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "llama.rope.freq_base": float(config.get("rope_theta", 10000.0)),
        **bpe_metadata(directory, pre),
        **more,
    }


def bpe_metadata(directory: Path, pre: str) -> dict[str, Any]:
    """Of a directory's tokenizer."""
    content = json.loads((directory / "tokenizer.json").read_text())
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    added = {token["id"]: token for token in content["added_tokens"]}
    by_id = {i: token for token, i in content["model"]["vocab"].items()}
    by_id |= {i: token["content"] for i, token in added.items()}
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(max(by_id) + 1)]
    types = [
        (3 if added[i]["special"] else 4) if i in added else 1 if i in by_id else 5
        for i in range(len(tokens))
    ]
    merges = [
        merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]
    ]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": merges,
    }
    for name in ("bos", "eos"):
        token = settings.get(f"{name}_token")
        if token is not None:
            metadata[f"tokenizer.ggml.{name}_token_id"] = tokens.index(token)
    metadata["tokenizer.ggml.add_bos_token"] = "bos_token" in settings
    if settings.get("chat_template"):
        metadata["tokenizer.chat_template"] = settings["chat_template"]
    return metadata


def interleaved(weights: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Rows in the order in which neighbouring dimensions are rotated together."""
    heads = weights.reshape(num_heads, 2, -1, *weights.shape[1:])
    return heads.swapaxes(1, 2).reshape(weights.shape)


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, np.ndarray):
        type_id = {"float32": 6, "int32": 5, "uint32": 4}[value.dtype.name]
        return struct.pack("<IIQ", 9, type_id, len(value)) + value.tobytes()
    return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
