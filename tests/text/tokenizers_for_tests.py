"""Small tokenizers of each kind, made in-process."""

from __future__ import annotations

import functools

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "größe, naïve café, 日本語のテキスト, emoji 🎉🎈👩‍👩‍👧",
    "numbers 0123456789 and (punctuation); tabs\tand\nlines",
] * 4


@functools.cache
def byte_level() -> Tokenizer:
    """Byte-level BPE, as of GPT-2, Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens(
        [AddedToken("two words", special=False), AddedToken("日本", special=False)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return tokenizer


@functools.cache
def byte_fallback() -> Tokenizer:
    """SentencePiece-like BPE with byte fallback, as of Llama 2 and Mistral."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted({char for char in "".join(TEXTS) if char.isascii() and char.isprintable()})
    words += ["▁", *(char for char in letters if char != " "), "th", "the", "▁the", "é"]
    vocabulary = {word: i for i, word in enumerate(words)}
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    model = models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


@functools.cache
def word_piece() -> Tokenizer:
    """A decoder that looks at neighbours: continuation marks and clean-up of spaces."""
    words = ["[UNK]", "the", "fox", "##es", "##y", ".", ",", "jump", "##s", "'", "t", "don"]
    tokenizer = Tokenizer(
        models.WordPiece(vocab={word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s|([.,'])"), "isolated")
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    return tokenizer
