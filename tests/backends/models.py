"""Tiny random checkpoints of families that the lmi engine doesn't know."""

import functools
import json
import os
import tempfile
from pathlib import Path

from tests.tiny_tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE, write_tokenizer

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
_SIDES = {
    f"{side}_{name}": value
    for side in ("encoder", "decoder")
    for name, value in {"layers": 2, "attention_heads": 4, "ffn_dim": 96}.items()
}
_STARTS = {"pad_token_id": 2, "decoder_start_token_id": 2}
ENCODER_DECODERS = {
    "t5": {
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 96,
        "num_layers": 2,
        "num_heads": 4,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
        **_STARTS,
    },
    "bart": {"d_model": 64, **_SIDES, "max_position_embeddings": 128, **_STARTS}
    | {"forced_eos_token_id": None},
    "marian": {"d_model": 64, **_SIDES, "max_position_embeddings": 128, **_STARTS}
    | {"forced_eos_token_id": None, "decoder_vocab_size": VOCAB_SIZE},
}
"""Relative, learned and fixed positions."""


@functools.cache
def checkpoint(model_type: str) -> Path:
    """Config, weights and tokenizer; shared by all tests, not to be written to."""
    import torch
    from transformers import AutoConfig, logging

    logging.disable_progress_bar()
    torch.manual_seed(7)
    changes = (FAMILIES | ENCODER_DECODERS)[model_type]
    config = AutoConfig.for_model(model_type, **_IDS, **changes)
    model = loader(model_type).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and model_type != "mamba":
                scale = 3.0 if model_type in ENCODER_DECODERS else 1.0
                parameter.copy_(scale * torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    if model_type == "bart":
        model.generation_config.forced_bos_token_id = 5
        model.generation_config.forced_eos_token_id = EOS_ID
    directory = Path(_root().name) / model_type
    model.save_pretrained(directory)
    if model_type == "t5":
        write_unigrams(directory)
    else:
        write_tokenizer(directory)
    return directory


def write_unigrams(directory: Path) -> None:
    """A tokenizer of T5's kind, as its own class saves it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import T5Tokenizer

    trained = Tokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=VOCAB_SIZE - 20,
        special_tokens=["<pad>", "</s>", "<unk>"],
        unk_token="<unk>",
        show_progress=False,
    )
    trained.train_from_iterator([__doc__ or "", Path(__file__).read_text()], trainer)
    pieces = json.loads(trained.to_str())["model"]["vocab"]
    T5Tokenizer(vocab=[tuple(piece) for piece in pieces], extra_ids=10).save_pretrained(directory)


def loader(model_type: str):
    """The class that loads it."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    return AutoModelForSeq2SeqLM if model_type in ENCODER_DECODERS else AutoModelForCausalLM


@functools.cache
def _root() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="lmi-families-")


@functools.cache
def oracle(model_type: str):
    """The model itself."""
    return loader(model_type).from_pretrained(checkpoint(model_type)).eval()


def is_greedy(model_type: str, prompt_ids: "tuple[int, ...]", output_ids: "list[int]") -> bool:
    """Whether the model itself, without any cache, finds each output token the likeliest."""
    import torch

    ids = [*prompt_ids, *output_ids]
    with torch.inference_mode():
        logits = oracle(model_type)(torch.tensor([ids]), use_cache=False).logits
    return logits[0, len(prompt_ids) - 1 : -1].argmax(-1).tolist() == output_ids
