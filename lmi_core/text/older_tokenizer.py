"""From the files that tokenizers had before ``tokenizer.json`` to its contents: SentencePiece's
``tokenizer.model``, and tiktoken's lists of tokens in base64.

No code from a model's directory runs: what its classes add is in tables here.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmi_core.errors import ModelError
from lmi_core.files import read_bytes
from lmi_core.text.gguf_tokenizer import PRE_TOKENIZERS, byte_level, tokenizer_files
from lmi_core.text.sentencepiece_file import read_sentencepiece

Content = dict[str, Any]
_SENTENCEPIECE, _QWEN = "tokenizer.model", "qwen.tiktoken"


@dataclass(frozen=True, slots=True)
class _Class:
    """What a tokenizer's Python class says, which its files don't."""

    added: tuple[str, ...] = ()
    """Special tokens behind those of the file."""
    prefix: tuple[str, ...] = ()
    """Tokens before every text, instead of the first one."""
    pre: str = ""
    """How text is split before merges of bytes, by GGUF's name; "": it is SentencePiece's."""


_GLM = ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop")
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_EXTRA = tuple(f"<|extra_{i}|>" for i in range(205))
_CLASSES = {
    "ChatGLMTokenizer": _Class((*_GLM, *_ROLES), prefix=("[gMASK]", "sop")),
    "ChatGLM4Tokenizer": _Class(prefix=("[gMASK]", "<sop>"), pre="chatglm-bpe"),
    "QWenTokenizer": _Class(("<|endoftext|>", "<|im_start|>", "<|im_end|>", *_EXTRA), pre="qwen2"),
}


OLDER_FILES = (_SENTENCEPIECE, _QWEN)


def has_older_tokenizer(directory: Path) -> bool:
    return any((directory / name).exists() for name in OLDER_FILES)


def older_tokenizer(directory: Path, config: Mapping[str, Any]) -> tuple[str, Content]:
    """tokenizer.json and tokenizer_config.json; ``config``: the latter as far as there is one.

    Raises ModelError for a file that can't be read, naming it.
    """
    is_qwen = (directory / _QWEN).exists()
    path = directory / (_QWEN if is_qwen else _SENTENCEPIECE)
    name = "QWenTokenizer" if is_qwen else str(config.get("tokenizer_class"))
    kind = _CLASSES.get(name, _Class())
    content, settings = _tiktoken(path, kind.pre) if kind.pre else _sentencepiece(path)
    _add_tokens(content, kind, directory, config)
    if kind.prefix:
        content["post_processor"] = _prefixed(path, content, kind.prefix)
    if kind.prefix or kind.pre:
        settings = {"add_bos_token": False, "add_eos_token": False}
        config = {key: value for key, value in config.items() if key not in settings}
    return json.dumps(content), {**settings, **config}


def _sentencepiece(path: Path) -> tuple[Content, Content]:
    file = read_sentencepiece(path)
    content, settings = tokenizer_files(file)
    before: list[Content] = []
    if file.charsmap:
        charsmap = base64.b64encode(file.charsmap).decode()
        before.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if file.removes_spaces:
        before.append({"type": "Strip", "strip_left": True, "strip_right": True})
        before.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    content["normalizer"]["normalizers"] = [*before, *content["normalizer"]["normalizers"]]
    return content, settings


def _tiktoken(path: Path, pre: str) -> tuple[Content, Content]:
    """Two neighbours are merged where there is a token of both, that of the least rank first: BPE
    whose merges are all ways to put a token together from two."""
    try:
        lines = [line.split() for line in read_bytes(path).splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except ValueError:
        raise ModelError(
            f"{path} isn't lines of a token in base64 and its rank: fetch it again, or put a "
            "tokenizer.json beside it",
            field=path.name,
        ) from None
    chars = _chars_of_bytes()
    spelled = {token: "".join(chars[byte] for byte in token) for token in ranks}
    merges = [
        [spelled[token[:i]], spelled[token[i:]]]
        for token in sorted(ranks, key=ranks.__getitem__)
        for i in range(1, len(token))
        if token[:i] in ranks and token[i:] in ranks
    ]
    vocab = {spelled[token]: rank for token, rank in ranks.items()}
    content: Content = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": []}
    content |= byte_level(vocab, merges, PRE_TOKENIZERS[pre]) | {"post_processor": None}
    if pre == "qwen2":
        content["normalizer"] = {"type": "NFC"}
    return content, {}


def _chars_of_bytes() -> list[str]:
    """What byte-level vocabularies spell each byte as: printable ones as themselves, others as the
    characters from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _add_tokens(content: Content, kind: _Class, directory: Path, config: Mapping[str, Any]) -> None:
    """Those of the class, of tokenizer_config.json and of added_tokens.json."""
    vocab: dict[str, int] = content["model"]["vocab"]
    first = 1 + max(vocab.values(), default=-1)
    tokens = {first + i: {"content": token} for i, token in enumerate(kind.added)}
    listed = directory / "added_tokens.json"
    try:
        older = json.loads(read_bytes(listed)) if listed.exists() else {}
        tokens |= {int(number): {"content": token} for token, number in older.items()}
        decoder = config.get("added_tokens_decoder") or {}
        tokens |= {int(number): token for number, token in decoder.items()}
        added = [_added(number, token) for number, token in sorted(tokens.items())]
    except (ValueError, AttributeError, KeyError, TypeError):
        raise ModelError(
            f"{directory}: added_tokens.json or added_tokens_decoder of tokenizer_config.json "
            "doesn't say tokens and their ids",
            field="tokenizer_config.json",
        ) from None
    own = {token["id"] for token in added}
    content["added_tokens"] = sorted(
        [token for token in content["added_tokens"] if token["id"] not in own] + added,
        key=lambda token: int(token["id"]),
    )


def _added(number: int, token: Mapping[str, Any]) -> Content:
    flags = {name: bool(token.get(name)) for name in ("single_word", "lstrip", "rstrip")}
    flags |= {"normalized": bool(token.get("normalized")), "special": token.get("special", True)}
    return {"id": number, "content": str(token["content"]), **flags}


def _prefixed(path: Path, content: Content, prefix: Sequence[str]) -> Content:
    ids = {token["content"]: token["id"] for token in content["added_tokens"]}
    if missing := [token for token in prefix if token not in ids]:
        raise ModelError(
            f"{path}: prompts begin with {missing[0]!r}, which tokenizer_config.json doesn't have "
            "among its added_tokens_decoder",
            field=path.name,
        )
    first = [{"SpecialToken": {"id": token, "type_id": 0}} for token in prefix]
    texts = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    return {
        "type": "TemplateProcessing",
        "single": [*first, texts[0]],
        "pair": [*first, *texts],
        "special_tokens": {
            token: {"id": token, "ids": [ids[token]], "tokens": [token]} for token in prefix
        },
    }
