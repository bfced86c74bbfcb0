"""Tokenizers of directories without tokenizer.json, against merging written out."""

from __future__ import annotations

import base64
import itertools
import json
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmi_core.errors import ModelError
from lmi_core.text.tokenizer import Tokenizer

TEXTS = [
    "a tale of  two cities, told at a table",
    "  leading and trailing  ",
    "naïve café 中文 \U0001f600",
    "the\nlast\tline",
    "",
]
WORDS = ["the", "tale", "table", "told", "two", "cities", "at", "of", "ta", "ble", "le", "t", "al"]


def merged(parts: list[Any], rank: Callable[[Any], float | None]) -> list[Any]:
    """Neighbours put together while there is a rank for both, the least first."""
    while True:
        ranks = [(rank(a + b), i) for i, (a, b) in enumerate(itertools.pairwise(parts))]
        known = [(r, i) for r, i in ranks if r is not None]
        if not known:
            return parts
        i = min(known)[1]
        parts = [*parts[:i], parts[i] + parts[i + 1], *parts[i + 2 :]]


def sentencepiece_model(kind: int = 2, **normalizer: bool) -> Any:
    proto = pytest.importorskip("transformers.utils.sentencepiece_model_pb2_new").ModelProto()
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    pieces += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    chars = sorted({char for word in WORDS for char in word} | set("▁,aelnd"))
    grown = {word[:n] for word in WORDS for n in range(2, len(word) + 1)}
    longer = sorted(grown | {"▁" + word for word in WORDS} | {"▁" + word[:2] for word in WORDS})
    pieces += [(piece, -float(i), 1) for i, piece in enumerate([*longer, *chars])]
    for piece, score, piece_type in pieces:
        proto.pieces.add(piece=piece, score=score, type=piece_type)
    proto.trainer_spec.model_type = kind
    for name, value in normalizer.items():
        setattr(proto.normalizer_spec, name, value)
    return proto


def written(directory: Path, proto: Any, **config: Any) -> Path:
    (directory / "tokenizer.model").write_bytes(proto.SerializeToString())
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def pieces_of(proto: Any, text: str) -> list[int]:
    """As SentencePiece's BPE has it: the best score first, bytes of what isn't a piece."""
    normalizer = proto.normalizer_spec
    if normalizer.remove_extra_whitespaces:
        text = re.sub(" {2,}", " ", text.strip(" "))
    if normalizer.add_dummy_prefix and text:
        text = " " + text
    ids = {piece.piece: i for i, piece in enumerate(proto.pieces)}
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == 1}
    parts = merged(
        [*text.replace(" ", "▁")], lambda piece: -scores[piece] if piece in scores else None
    )
    found = []
    for part in parts:
        codes = [f"<0x{byte:02X}>" for byte in part.encode()]
        found += [ids[part]] if part in ids else [ids[code] for code in codes]
    return found


@pytest.mark.parametrize("adds_prefix", [True, False])
@pytest.mark.parametrize("removes", [True, False])
def test_sentencepieces_merges(adds_prefix: bool, removes: bool, tmp_path: Path) -> None:
    proto = sentencepiece_model(add_dummy_prefix=adds_prefix, remove_extra_whitespaces=removes)
    tokenizer = Tokenizer.load(written(tmp_path, proto))
    for text in TEXTS:
        ids = tokenizer.encode_now(text)
        assert ids == [1, *pieces_of(proto, text)]
        if not removes:
            assert tokenizer.decode(ids) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_tokens_of_other_files_are_added(tmp_path: Path) -> None:
    proto = sentencepiece_model()
    count = len(proto.pieces)
    decoder = {str(count + 1): {"content": "<end>", "special": True}}
    path = written(tmp_path, proto, add_bos_token=False, added_tokens_decoder=decoder)
    (path / "added_tokens.json").write_text(json.dumps({"<turn>": count}))
    tokenizer = Tokenizer.load(path)
    ids = tokenizer.encode_now("<turn>at<end>")
    assert (ids[0], ids[-1]) == (count, count + 1)
    assert tokenizer.decode(ids) == "at"


def test_chatglm_begins_with_its_prefix(tmp_path: Path) -> None:
    proto = sentencepiece_model()
    count = len(proto.pieces)
    tokenizer = Tokenizer.load(written(tmp_path, proto, tokenizer_class="ChatGLMTokenizer"))
    ids = tokenizer.encode_now("the table<|user|>")
    assert ids == [count + 1, count + 3, *pieces_of(proto, "the table"), count + 6]
    assert tokenizer.decode(ids) == "the table"


def tiktoken_ranks() -> dict[bytes, int]:
    tokens = [bytes([byte]) for byte in range(256)]
    grown = {word[:n].encode() for word in WORDS for n in range(2, len(word) + 1)}
    tokens += sorted(grown | {b" " + word.encode() for word in WORDS} | {b" t", b" a", b"\xc3\xa9"})
    return {token: rank for rank, token in enumerate(tokens)}


def test_qwens_tokens_are_tiktokens(tmp_path: Path) -> None:
    ranks = tiktoken_ranks()
    lines = [base64.b64encode(token) + b" %d" % rank for token, rank in ranks.items()]
    (tmp_path / "qwen.tiktoken").write_bytes(b"\n".join(lines) + b"\n")
    tokenizer = Tokenizer.load(tmp_path)
    for text in (*TEXTS, "cafe\u0301"):
        ids = tokenizer.encode_now(text)
        assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)
        for word in re.findall(r" ?[a-zé]+", text):
            assert tokenizer.encode_now(word) == bytes_merged(word, ranks)
    ids = tokenizer.encode_now("<|im_start|>at<|im_end|>")
    assert (ids[0], ids[-1]) == (len(ranks) + 1, len(ranks) + 2)


def test_glm_4s_first_files(tmp_path: Path) -> None:
    ranks = tiktoken_ranks()
    lines = [base64.b64encode(token) + b" %d" % rank for token, rank in ranks.items()]
    (tmp_path / "tokenizer.model").write_bytes(b"\n".join(lines))
    added = {str(len(ranks) + i): {"content": c} for i, c in enumerate(("[gMASK]", "<sop>"))}
    config = {"tokenizer_class": "ChatGLM4Tokenizer", "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ids = Tokenizer.load(tmp_path).encode_now("table")
    assert ids == [len(ranks), len(ranks) + 1, *bytes_merged("table", ranks)]
    config["added_tokens_decoder"] = {}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"prompts begin with '\[gMASK\]', which"):
        Tokenizer.load(tmp_path)


def bytes_merged(word: str, ranks: dict[bytes, int]) -> list[int]:
    parts = [bytes([byte]) for byte in word.encode()]
    return [ranks[part] for part in merged(parts, ranks.get)]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (lambda: sentencepiece_model(1).SerializeToString(), "of type unigram"),
        (lambda: b"\x0a\xff\xff\x03tail", "is no SentencePiece model"),
        (lambda: b"version https://git-lfs.github.com/spec/v1\n", "is no SentencePiece model"),
    ],
)
def test_other_files_are_refused_by_name(
    content: Callable[[], bytes], problem: str, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content())
    with pytest.raises(ModelError, match=rf"tokenizer\.model is .*{problem}|{problem}"):
        Tokenizer.load(tmp_path)


def test_a_list_of_tokens_that_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "qwen.tiktoken").write_bytes(b"IQ== 0\nIg==\n")
    with pytest.raises(ModelError, match=r"qwen\.tiktoken isn't lines of a token"):
        Tokenizer.load(tmp_path)
