"""The tokenizer: byte-level BPE trained on the corpus, every digit a token of its own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from bench.demo import chat


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A tokenizer for exactly `vocab_size` tokens, the special ones first.

    All 256 bytes are in the alphabet, so any text can be encoded.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in chat.SPECIAL_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(map(_without_special, texts), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"The corpus gave {tokenizer.get_vocab_size()} tokens, not {vocab_size}.")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{chat.BEGIN} $A",
        pair=f"{chat.BEGIN} $A {chat.BEGIN} $B",
        special_tokens=[(chat.BEGIN, chat.SPECIAL_TOKENS.index(chat.BEGIN))],
    )
    return tokenizer


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer stored as `tokenizer.json` in `directory`."""
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def _without_special(text: str) -> str:
    for token in chat.SPECIAL_TOKENS:
        text = text.replace(token, "\n")
    return text
