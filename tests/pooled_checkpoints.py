"""Tiny random checkpoints of models that pool, written by transformers, with the files that
sentence-transformers adds."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from tests.checkpoints import SHAPE, _root, draw_weights
from tests.tiny_tokenizer import VOCAB_SIZE, write_tokenizer

DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 24, "head_dim": 32}),
    "qwen2": ("qwen2", {}),
    "gemma": ("gemma", {"head_dim": 32}),
}
_MODULES = "sentence_transformers.models."


def write_modules(
    directory: Path, pooling: str, *, normalizes: bool = True, **files: dict[str, Any]
) -> None:
    """modules.json with a pooling by ``pooling_mode_...``; ``files``: others by their stems."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalizes else [])]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": _MODULES + kind}
        for i, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    modes = {"cls_token": False, "mean_tokens": False, "lasttoken": False, pooling: True}
    settings = {f"pooling_mode_{mode}": value for mode, value in modes.items()}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))


def make_pooled(
    directory: Path, model_type: str, extra: dict[str, Any], *, kind: str = "AutoModel"
) -> Path:
    """Write a checkpoint of ``kind``, one of transformers' classes, to ``directory``."""
    import transformers

    settings = {**SHAPE, **extra}
    config = transformers.AutoConfig.for_model(model_type, **settings)
    model = getattr(transformers, kind).from_config(config)
    draw_weights(model, 0)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    write_tokenizer(directory, VOCAB_SIZE)
    return directory


@functools.cache
def decoder(name: str, kind: str = "AutoModel") -> Path:
    """A decoder's checkpoint shared by all tests of the session; it must not be written to."""
    model_type, extra = DECODERS[name]
    labels = {"num_labels": 1, "pad_token_id": 2} if "Classification" in kind else {}
    return make_pooled(_root() / f"pooled-{name}-{kind}", model_type, extra | labels, kind=kind)


_ENCODER = {"max_position_embeddings": 330, "pad_token_id": 1}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {"type_vocab_size": 2, "max_position_embeddings": 320}),
    "roberta": ("roberta", {"type_vocab_size": 1, **_ENCODER}),
    "xlm_roberta": ("xlm-roberta", {"type_vocab_size": 1, **_ENCODER}),
    "mpnet": ("mpnet", {"relative_attention_num_buckets": 32, **_ENCODER}),
    "modernbert": (
        "modernbert",
        {"local_attention": 24, "global_attn_every_n_layers": 2, "num_hidden_layers": 4}
        | {"max_position_embeddings": 320, "pad_token_id": 1, "cls_token_id": 0}
        | {"sep_token_id": 1, "reference_compile": False, "global_rope_theta": 5000.0},
    ),
}


@functools.cache
def encoder(name: str, kind: str = "AutoModel") -> Path:
    """An encoder's checkpoint, as ``decoder`` has it."""
    model_type, extra = ENCODERS[name]
    labels = {"num_labels": 1} if "Classification" in kind else {}
    return make_pooled(_root() / f"pooled-{name}-{kind}", model_type, extra | labels, kind=kind)
