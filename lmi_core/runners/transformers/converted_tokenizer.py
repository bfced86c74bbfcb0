"""Tokenizers in older forms than tokenizer.json, as Transformers converts them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tokenizers

from lmi_core.errors import ModelError
from lmi_core.files import read_json
from lmi_core.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lmi_core.settings.transformers_config import TransformersConfig


def convert_tokenizer(config: TransformersConfig) -> Tokenizer:
    """Build the tokenizer from vocabulary and merges, SentencePiece or the model's own code.

    Raises ModelError if there is none, or only one that is written in Python.
    """
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(
            str(config.model), trust_remote_code=config.trust_remote_code, local_files_only=True
        )
    except Exception as error:  # the library raises every kind
        reason = " ".join(str(error).split())[:300]
        raise ModelError(
            f"{config.model} has no tokenizer.json, and Transformers can't load another: {reason}",
            field="tokenizer.json",
        ) from error
    backend = getattr(converted, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(
            f"{config.model} has a tokenizer ({type(converted).__name__}) that is written in "
            "Python and can't be converted to tokenizer.json; only those that can are served",
            field="tokenizer.json",
        )
    stored = tokenizers.Tokenizer.from_str(backend.to_str())
    return Tokenizer(stored, read_json(config.model / "tokenizer_config.json"))
