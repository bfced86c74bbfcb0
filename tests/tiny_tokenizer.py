"""A byte-level BPE tokenizer with a chat template, which tiny checkpoints share."""

from __future__ import annotations

import functools
import json
from pathlib import Path

VOCAB_SIZE = 384
BOS_ID, EOS_ID = 0, 1
SPECIAL_TOKENS = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tokenizer(directory: Path, vocab_size: int = VOCAB_SIZE) -> None:
    """A byte-level BPE tokenizer with a chat template; ids 0 to 3 are ``SPECIAL_TOKENS``."""
    (directory / "tokenizer.json").write_text(_tokenizer_json(vocab_size), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": SPECIAL_TOKENS[BOS_ID],
                "eos_token": SPECIAL_TOKENS[EOS_ID],
                "chat_template": CHAT_TEMPLATE,
            }
        ),
        encoding="utf-8",
    )


@functools.cache
def _tokenizer_json(vocab_size: int) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sentences = (
        f"The {colour} {animal} {verb} near the {place}, {number} times a day."
        for number, colour in enumerate(("red", "green", "small", "quiet"))
        for animal in ("fox", "heron", "horse", "mouse")
        for verb in ("sleeps", "sings", "waits", "walks")
        for place in ("river", "garden", "harbour", "mountain")
    )
    tokenizer.train_from_iterator(sentences, trainer)
    return str(tokenizer.to_str())
