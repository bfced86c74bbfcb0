"""The trained network and its tokenizer as a Hugging Face model directory."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from bench.demo import chat
from bench.demo.network import Network, Shape


def model_config(shape: Shape) -> dict[str, object]:
    """The `config.json` of the network."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.mlp_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_size,
        "max_position_embeddings": shape.max_positions,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": token_id(chat.BEGIN),
        "eos_token_id": eos_ids(),
        "pad_token_id": token_id(chat.END_OF_TEXT),
    }


def token_id(token: str) -> int:
    """The id of a special token."""
    return chat.SPECIAL_TOKENS.index(token)


def eos_ids() -> list[int]:
    """The tokens that end a generation: of a plain text, and of a turn."""
    return [token_id(chat.END_OF_TEXT), token_id(chat.END_OF_TURN)]


def generation_config() -> dict[str, object]:
    """The `generation_config.json`: greedy by default."""
    return {
        "bos_token_id": token_id(chat.BEGIN),
        "eos_token_id": eos_ids(),
        "pad_token_id": token_id(chat.END_OF_TEXT),
        "do_sample": False,
    }


def tokenizer_config(shape: Shape) -> dict[str, object]:
    """The `tokenizer_config.json`, the chat template in it."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": chat.BEGIN,
        "eos_token": chat.END_OF_TURN,
        "pad_token": chat.END_OF_TEXT,
        "model_max_length": shape.max_positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat.TEMPLATE,
    }


def special_tokens_map() -> dict[str, object]:
    """The `special_tokens_map.json`."""
    return {
        "bos_token": chat.BEGIN,
        "eos_token": chat.END_OF_TURN,
        "pad_token": chat.END_OF_TEXT,
    }


def export(network: Network, tokenizer: Tokenizer, directory: Path) -> None:
    """Write the model directory, weights rounded to bfloat16."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = {
        f"model.{name}": value.detach().to(torch.bfloat16).contiguous()
        for name, value in network.state_dict().items()
    }
    path = directory / "model.safetensors"
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, content in (
        ("config.json", model_config(network.shape)),
        ("generation_config.json", generation_config()),
        ("tokenizer_config.json", tokenizer_config(network.shape)),
        ("special_tokens_map.json", special_tokens_map()),
    ):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")
