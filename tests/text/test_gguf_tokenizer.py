"""Tokenizers in GGUF's metadata give the ids of those that they were made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from lmi_core.errors import ModelError
from lmi_core.text.gguf_tokenizer import (
    PRE_TOKENIZERS,
    eos_token_ids,
    tokenizer_files,
    tokenizer_notes,
)
from lmi_core.weights.gguf.file import GgufFile
from tests.gguf_files import bpe_metadata
from tests.text.tokenizers_for_tests import TEXTS

WORDS = st.lists(
    st.sampled_from(
        ["Hello", "it's", "IT'S", " ", "  ", "\n", "\r\n\n", "\t", "1", "12", "12345", "日本",
         "é", "e\u0301", "🎉", "_x", "$", "...", "</s>", "two words", "don't", "A1b2", "ǅ", "the",
         "lazy dog"]
    ),
    max_size=12,
).map("".join)  # fmt: skip
SPECIAL = ["<s>", "</s>", "<|turn|>"]


def file(metadata: dict[str, Any]) -> GgufFile:
    return GgufFile(Path("model.gguf"), metadata, {})


def read(metadata: dict[str, Any]) -> Tokenizer:
    content, _ = tokenizer_files(file(metadata))
    return Tokenizer.from_str(json.dumps(content))


def trained(name: str) -> Tokenizer:
    """Byte-level BPE as libraries have it, whose text is split as ``name`` says."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=PRE_TOKENIZERS[name].ignores_merges))
    splits = [
        pre_tokenizers.Split(Regex(expression), "isolated")
        for expression in PRE_TOKENIZERS[name].expressions
    ]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*TEXTS, "it's IT'S 12345 1234 Hello, World..."] * 2, trainer)
    tokenizer.add_tokens(["two words"])
    return tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizer")


def written(tokenizer: Tokenizer, directory: Path, name: str) -> dict[str, Any]:
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    return bpe_metadata(directory, name)


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_byte_level_ids_are_the_originals(name: str, directory: Path) -> None:
    original = trained(name)
    ours = read(written(original, directory, name))

    @settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @example("it's IT'S 12345\r\n\n  two words</s>x")
    @given(WORDS)
    def check(text: str) -> None:
        wanted = original.encode(text).ids
        assert ours.encode(text).ids == wanted
        assert ours.decode(wanted) == original.decode(wanted)

    check()


def test_without_a_pre_tokenizer_the_split_is_llama_cpps_and_told(directory: Path) -> None:
    named = written(trained("default"), directory, "default")
    unnamed = {key: value for key, value in named.items() if key != "tokenizer.ggml.pre"}
    text = "it's 123456 x=1\n\n y"
    assert read(unnamed).encode(text).ids == read(named).encode(text).ids
    pieces = read(unnamed).pre_tokenizer.pre_tokenize_str("it's 1234 x=y")
    assert [piece for piece, _ in pieces] == ["it", "'", "s", "Ġ", "123", "4", "Ġx", "=", "y"]
    (note,) = tokenizer_notes(file(unnamed))
    assert "no tokenizer.ggml.pre" in note
    assert not tokenizer_notes(file(named))


def test_gpt2s_expression_splits_as_the_library_does() -> None:
    (expression,) = PRE_TOKENIZERS["gpt-2"].expressions
    own = pre_tokenizers.Split(Regex(expression), "isolated")
    library = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for text in (*TEXTS, "it's  I'll\n\n x\t 12ab 日本", "a   ", "   a"):
        wanted = [span for _, span in library.pre_tokenize_str(text)]
        assert [span for _, span in own.pre_tokenize_str(text)] == wanted


def sentencepiece(*, prefix: bool) -> tuple[Tokenizer, dict[str, Any]]:
    """Pieces with scores as SentencePiece trains them for BPE, and the same as merges in order."""
    normal = Tokenizer(models.BPE(unk_token="<unk>"))
    texts = [f"▁{text}".replace(" ", "▁") for text in TEXTS]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False)
    normal.train_from_iterator(texts, trainer)
    merges = [tuple(merge) for merge in json.loads(normal.to_str())["model"]["merges"]]
    letters = sorted({char for text in texts for char in text if char not in "日本🎉"})
    merges = [m for m in merges if all(char in letters for char in "".join(m))]
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    made = list(dict.fromkeys("".join(merge) for merge in merges))
    tokens = [*special, *made, *letters]
    scores = [*[0.0] * len(special), *range(0, -len(made), -1), *[-1e6] * len(letters)]
    model = models.BPE(
        {token: i for i, token in enumerate(tokens)},
        merges,
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.token_type": np.array(
            [2, 3, 3, *[6] * 256, *[1] * (len(made) + len(letters))], np.int32
        ),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": prefix,
    }
    return Tokenizer(model), metadata


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_are_merged_by_their_scores(prefix: bool) -> None:
    original, metadata = sentencepiece(prefix=prefix)
    ours = read(metadata)

    @settings(max_examples=100)
    @given(WORDS.filter(lambda text: "</s>" not in text))
    def check(text: str) -> None:
        pieces = text.replace(" ", "▁")
        wanted = original.encode(f"▁{pieces}" if prefix and pieces else pieces).ids
        assert ours.encode(text).ids == wanted
        assert ours.decode(wanted) == text, "bytes stand for what has no piece"

    check()


def test_special_tokens_and_the_template_are_read() -> None:
    _, metadata = sentencepiece(prefix=True)
    metadata |= {
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.chat_template": "{{ messages }}",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "{{ tools }}",
    }
    _, config = tokenizer_files(file(metadata))
    assert (config["bos_token"], config["eos_token"]) == ("<s>", "</s>")
    assert (config["add_bos_token"], config["add_eos_token"]) == (True, False)
    assert config["chat_template"] == [
        {"name": "default", "template": "{{ messages }}"},
        {"name": "tool_use", "template": "{{ tools }}"},
    ]
    assert eos_token_ids(file(metadata)) == [2, 5]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokenizer.ggml.model": "t5"}, "tokenizer 't5'; llama .SentencePiece. and gpt2"),
        ({"tokenizer.ggml.tokens": None}, "no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": ["a"] * 2 + ["b" * 2000]}, "token of 2000 characters"),
        ({"tokenizer.ggml.scores": None}, "not as many tokenizer.ggml.scores"),
        ({"tokenizer.ggml.token_type": np.zeros(3, np.int32)}, "not as many types"),
        ({"tokenizer.ggml.bos_token_id": 10**6}, "bos_token_id 1000000, but"),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "odd"},
            "pre-tokenizer 'odd'; known are default",
        ),
        ({"tokenizer.ggml.model": "gpt2"}, "no tokenizer.ggml.merges"),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["ab"]},
            "merge 'ab' of one part",
        ),
    ],
)
def test_what_there_isnt_is_named(change: dict[str, Any], words: str) -> None:
    _, metadata = sentencepiece(prefix=True)
    changed = {key: value for key, value in (metadata | change).items() if value is not None}
    with pytest.raises(ModelError, match=words) as caught:
        tokenizer_files(file(changed))
    assert "model.gguf" in str(caught.value)
