"""Tiny random checkpoints of families that the lmi engine doesn't know."""

import functools
import os
import tempfile
from pathlib import Path

from tests.checkpoints import BOS_ID, EOS_ID, VOCAB_SIZE, write_tokenizer

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

_IDS = {"vocab_size": VOCAB_SIZE, "bos_token_id": BOS_ID, "eos_token_id": EOS_ID}
_WIDE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "gpt_neox": {**_WIDE, "intermediate_size": 128, "max_position_embeddings": 256},
    "opt": {
        **_WIDE,
        "ffn_dim": 128,
        "word_embed_proj_dim": 64,
        "max_position_embeddings": 256,
        "pad_token_id": 2,
    },
    "gemma2": {
        **_WIDE,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "sliding_window": 12,
        "max_position_embeddings": 256,
        "pad_token_id": 2,
    },
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4, "pad_token_id": 2},
    "mamba": {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, "pad_token_id": 2},
}
"""Absolute, rotary, offset and windowed positions; ALiBi; a recurrent state."""


@functools.cache
def checkpoint(model_type: str) -> Path:
    """Config, weights and tokenizer; shared by all tests, not to be written to."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, logging

    logging.disable_progress_bar()
    torch.manual_seed(7)
    config = AutoConfig.for_model(model_type, **_IDS, **FAMILIES[model_type])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and model_type != "mamba":
                parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    directory = Path(_root().name) / model_type
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


@functools.cache
def _root() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="lmi-families-")


@functools.cache
def oracle(model_type: str):
    """The model itself."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint(model_type)).eval()


def is_greedy(model_type: str, prompt_ids: "tuple[int, ...]", output_ids: "list[int]") -> bool:
    """Whether the model itself, without any cache, finds each output token the likeliest."""
    import torch

    ids = [*prompt_ids, *output_ids]
    with torch.inference_mode():
        logits = oracle(model_type)(torch.tensor([ids]), use_cache=False).logits
    return logits[0, len(prompt_ids) - 1 : -1].argmax(-1).tolist() == output_ids
