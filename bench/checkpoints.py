"""Random checkpoints of the shapes that the benchmarks use, written without torch.

``python -m bench.checkpoints 160m build/models/160m`` makes one; the benchmarks make what they need
under ``build/models``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

VOCAB_SIZE = 32000


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    tied: bool
    vocab_size: int = VOCAB_SIZE
    max_positions: int = 4096

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def kv_columns(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim

    def params_read(self, num_rows: int) -> float:
        return self.linear_params

    @property
    def has_bias(self) -> bool:
        return self.architecture == "Qwen2ForCausalLM"

    @property
    def linear_params(self) -> int:
        """Weights of all linears that a decode step reads, the head included."""
        qkv = self.hidden_size * self.head_dim * (self.num_heads + 2 * self.num_kv_heads)
        per_layer = (
            qkv
            + self.num_heads * self.head_dim * self.hidden_size
            + 3 * self.hidden_size * self.intermediate_size
        )
        return self.num_layers * per_layer + self.vocab_size * self.hidden_size


MakeTensor = Callable[[str, tuple[int, ...]], Iterable[bytes]]
"""The bf16 bytes of a tensor, by name and shape, in pieces."""

SHAPES = {
    shape.name: shape
    for shape in (
        Shape("160m", "LlamaForCausalLM", 12, 768, 12, 12, 2048, False),
        Shape("0.5b", "Qwen2ForCausalLM", 24, 896, 14, 2, 4864, True),
        Shape("1.1b", "LlamaForCausalLM", 22, 2048, 32, 4, 5632, False),
        Shape("near-zero", "LlamaForCausalLM", 1, 64, 1, 1, 128, False),
    )
}


def config_of(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": [shape.architecture],
        "model_type": "qwen2" if shape.has_bias else "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": shape.tied,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def tensors_of(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Names and shapes of every tensor in the checkpoint."""
    hidden, head = shape.hidden_size, shape.head_dim
    tensors: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not shape.tied:
        tensors["lm_head.weight"] = (shape.vocab_size, hidden)
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        for name, outputs in (
            ("q_proj", shape.num_heads * head),
            ("k_proj", shape.num_kv_heads * head),
            ("v_proj", shape.num_kv_heads * head),
        ):
            tensors[f"{prefix}self_attn.{name}.weight"] = (outputs, hidden)
            if shape.has_bias:
                tensors[f"{prefix}self_attn.{name}.bias"] = (outputs,)
        tensors[f"{prefix}self_attn.o_proj.weight"] = (hidden, shape.num_heads * head)
        tensors[f"{prefix}mlp.gate_proj.weight"] = (shape.intermediate_size, hidden)
        tensors[f"{prefix}mlp.up_proj.weight"] = (shape.intermediate_size, hidden)
        tensors[f"{prefix}mlp.down_proj.weight"] = (hidden, shape.intermediate_size)
        tensors[f"{prefix}input_layernorm.weight"] = (hidden,)
        tensors[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
    return tensors


def random_bf16(rng: np.random.Generator, shape: tuple[int, ...], is_norm: bool) -> bytes:
    """Normal values with a standard deviation of 1 / sqrt(inputs); norms are ones."""
    if is_norm:
        return np.full(shape, 0x3F80, np.uint16).tobytes()
    scale = np.float32(1.0 / np.sqrt(shape[-1])) if len(shape) > 1 else np.float32(0.02)
    values = rng.standard_normal(shape, np.float32) * scale
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def write_safetensors(path: Path, tensors: dict[str, tuple[int, ...]], make: MakeTensor) -> None:
    """A bf16 file tensor by tensor, never more than one in memory."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dims in tensors.items():
        begin, end = end, end + 2 * int(np.prod(dims))
        header[name] = {"dtype": "BF16", "shape": list(dims), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, dims in tensors.items():
            file.writelines(make(name, dims))


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """A byte-level tokenizer whose further ids are words of the form `` w123``."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<s>", "</s>", *alphabet]
    tokens += [f"Ġw{i}" for i in range(vocab_size - len(tokens))]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken("<s>", special=True), AddedToken("</s>", special=True)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def make_checkpoint(
    shape: Shape, directory: Path, seed: int = 0, make: MakeTensor | None = None
) -> Path:
    """Write the checkpoint, random or as ``make`` says, unless it is there; returns the
    directory."""
    rng = np.random.default_rng(seed)
    make = make or (lambda name, dims: [random_bf16(rng, dims, "norm" in name)])
    return write_checkpoint(directory, config_of(shape), tensors_of(shape), make)


def write_checkpoint(
    directory: Path,
    config: dict[str, Any],
    tensors: dict[str, tuple[int, ...]],
    make: MakeTensor,
) -> Path:
    """Write tokenizer, configuration and tensors unless they are there; returns the directory."""
    if (directory / "model.safetensors").exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory, config["vocab_size"])
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    partial = directory / "model.safetensors.partial"
    write_safetensors(partial, tensors, make)
    partial.rename(directory / "model.safetensors")
    return directory


def make_draft_pair(name: str, num_layers: int, loudness: float) -> tuple[Path, Path]:
    """A named shape whose layers from ``num_layers`` on add only ``loudness`` of what they would,
    and what is left of it without them, which so guesses it well; under build/models."""
    shape = SHAPES[name]
    rng = np.random.default_rng(0)

    def make(tensor: str, dims: tuple[int, ...]) -> Iterable[bytes]:
        data = random_bf16(rng, dims, "norm" in tensor)
        parts = tensor.split(".")
        is_late = parts[1] == "layers" and int(parts[2]) >= num_layers
        if not is_late or not tensor.endswith(("o_proj.weight", "down_proj.weight")):
            return [data]
        values = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
        scaled = (values * np.float32(loudness)).view(np.uint32) >> 16
        return [scaled.astype(np.uint16).tobytes()]

    root = Path("build/models")
    target = make_checkpoint(shape, root / f"{name}-late-{num_layers}-{loudness:g}", make=make)
    first = replace(shape, num_layers=num_layers)
    return target, make_checkpoint(first, root / f"{name}-first-{num_layers}")


def checkpoint(name: str) -> Path:
    """The checkpoint of a named shape under build/models, made if it isn't there."""
    return make_checkpoint(SHAPES[name], Path("build/models") / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    print(make_checkpoint(SHAPES[arguments.shape], arguments.directory))


if __name__ == "__main__":
    main()
