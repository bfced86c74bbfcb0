"""From a GGUF file's metadata to the contents of ``tokenizer.json`` and ``tokenizer_config.json``.

Format: keys as ggml's document on GGUF has them; what pre-tokenizers' names stand for, llama.cpp's
vocabulary says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lmi_core.errors import ModelError


class GgufFile(Protocol):
    """A GGUF file that has been read, or what is told as one."""

    @property
    def path(self) -> Path: ...
    @property
    def metadata(self) -> Mapping[str, Any]: ...


_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
"""Types of tokens."""
_SPACE = "\u2581"
_MAX_TOKEN_CHARS = 1024
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    "[0-9][0-9][0-9]",
)
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_LLAMA3 = _WORDS + r"\p{N}{1,3}|" + _REST
_QWEN2 = _WORDS + r"\p{N}|" + _REST
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+{end}"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*{end}|"
)
_CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = _CASED.replace("{end}", "") + r"\p{N}" + _CASED_REST
_GPT4O = _CASED.replace("{end}", _CONTRACTIONS + "?") + r"\p{N}{1,3}" + _CASED_REST
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    r""" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
_HAN_AND_KANA = "[一-龥\u3040-\u309f\u30a0-\u30ff]+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is split before merges: by each expression in turn, its matches apart from what lies
    between them."""

    expressions: tuple[str, ...]
    ignores_merges: bool = False
    """What is a token as a whole isn't merged from parts."""
    adds_bos: bool = False
    """Where the file doesn't say."""


_OF_LLAMA3 = PreTokenizer((_LLAMA3,), ignores_merges=True, adds_bos=True)
_OF_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_OF_GPT2 = PreTokenizer((_GPT2,))
_OF_QWEN2 = PreTokenizer((_QWEN2,))
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": PreTokenizer(_DEFAULT),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"), _OF_LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), PreTokenizer((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez", "hunyuan"), _OF_QWEN2),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "gigachat"), _OF_GPT2),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"),
        _OF_DIGITS,
    ),
    "tekken": PreTokenizer((_TEKKEN,), ignores_merges=True, adds_bos=True),
    "gpt-4o": PreTokenizer((_GPT4O,)),
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", _HAN_AND_KANA, _DEEPSEEK3)),
    "deepseek-coder": PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")
    ),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
}
"""By their names in files."""


def tokenizer_files(file: GgufFile) -> tuple[dict[str, Any], dict[str, Any]]:
    """The contents of tokenizer.json and tokenizer_config.json.

    Raises ModelError for a tokenizer that there isn't here, naming it.
    """
    metadata = file.metadata
    kind = metadata.get("tokenizer.ggml.model")
    tokens = _tokens(file)
    types = _types(file, len(tokens))
    if kind == "llama":
        parts = _sentencepiece(file, tokens, types)
        adds_bos = True
    elif kind == "gpt2":
        pre = _pre_tokenizer(file)
        parts = byte_level(_ids(tokens), _merges(file), pre)
        adds_bos = pre.adds_bos
    else:
        raise ModelError(
            f"{file.path} has a tokenizer {str(kind)[:40]!r}; llama (SentencePiece) and gpt2 "
            "(byte-level BPE) can be read",
            field="tokenizer.ggml.model",
        )
    added = [
        {
            "id": token_id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": _SPACE in token,
            "special": types[token_id] == _CONTROL,
        }
        for token_id, token in enumerate(tokens)
        if types[token_id] in (_CONTROL, _USER_DEFINED) and token
    ]
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "post_processor": None,
        **parts,
    }
    return content, _settings(file, tokens, adds_bos=adds_bos)


def tokenizer_notes(file: GgufFile) -> list[str]:
    """What of it the file doesn't say."""
    metadata = file.metadata
    if metadata.get("tokenizer.ggml.model") != "gpt2" or "tokenizer.ggml.pre" in metadata:
        return []
    return [
        "it has no tokenizer.ggml.pre, so text is split before merges by llama.cpp's default, "
        "which may not be what the model was trained with: convert the model anew"
    ]


def eos_token_ids(file: GgufFile) -> list[int]:
    """Of the tokens that end a text, a turn or a message."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = (_token_id(file, key) for key in keys)
    return sorted({token_id for token_id in found if token_id is not None})


def _fault(path: Path, problem: str) -> ModelError:
    return ModelError(f"{path}: {problem}; the file is damaged, fetch it again", field=path.name)


def _settings(file: GgufFile, tokens: Sequence[str], *, adds_bos: bool) -> dict[str, Any]:
    metadata = file.metadata
    settings: dict[str, Any] = {
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos)),
        "add_eos_token": bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
    }
    for name, key in (
        ("bos_token", "bos_token_id"),
        ("eos_token", "eos_token_id"),
        ("unk_token", "unknown_token_id"),
        ("pad_token", "padding_token_id"),
    ):
        if (token_id := _token_id(file, key)) is not None:
            settings[name] = tokens[token_id]
    for name in ("bos", "eos"):
        if f"{name}_token" not in settings:
            settings[f"add_{name}_token"] = False
    template = metadata.get("tokenizer.chat_template")
    others = metadata.get("tokenizer.chat_templates")
    if isinstance(others, list) and template is not None:
        names = {"default": template} | {
            name: metadata[f"tokenizer.chat_template.{name}"]
            for name in others
            if f"tokenizer.chat_template.{name}" in metadata
        }
        template = [{"name": name, "template": text} for name, text in names.items()]
    if isinstance(template, str | list) and template:
        settings["chat_template"] = template
    return settings


def _tokens(file: GgufFile) -> list[str]:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise _fault(file.path, "has no tokenizer.ggml.tokens")
    seen: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        if len(token) > _MAX_TOKEN_CHARS:
            raise _fault(file.path, f"has a token of {len(token)} characters")
        if seen.setdefault(token, token_id) != token_id:
            # Two ids can't be told apart by text: the later one is never made, only read.
            tokens[token_id] = f"{token}[{token_id}]"
    return tokens


def _types(file: GgufFile, num_tokens: int) -> list[int]:
    types = file.metadata.get("tokenizer.ggml.token_type")
    if types is None:
        return [_NORMAL] * num_tokens
    is_whole = isinstance(types, np.ndarray) and np.issubdtype(types.dtype, np.integer)
    if not is_whole or len(types) != num_tokens:
        raise _fault(file.path, f"has {num_tokens} tokens, but not as many types of them")
    return [int(kind) for kind in types]


def _token_id(file: GgufFile, key: str) -> int | None:
    value = file.metadata.get(f"tokenizer.ggml.{key}")
    num_tokens = len(file.metadata["tokenizer.ggml.tokens"])
    if value is None or value == 0xFFFFFFFF:
        return None
    if not isinstance(value, int) or not 0 <= value < num_tokens:
        raise _fault(
            file.path, f"has tokenizer.ggml.{key} {str(value)[:40]}, but {num_tokens} tokens"
        )
    return value


def _pre_tokenizer(file: GgufFile) -> PreTokenizer:
    name = file.metadata.get("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise ModelError(
            f"{file.path} has a pre-tokenizer {str(name)[:40]!r}; known are "
            f"{', '.join(PRE_TOKENIZERS)}",
            field="tokenizer.ggml.pre",
        )
    return PRE_TOKENIZERS[name]


def _ids(tokens: Sequence[str]) -> dict[str, int]:
    return {token: token_id for token_id, token in enumerate(tokens)}


def _merges(file: GgufFile) -> list[list[str]]:
    lines = file.metadata.get("tokenizer.ggml.merges")
    if not isinstance(lines, list):
        raise _fault(file.path, "has no tokenizer.ggml.merges")
    merges = []
    for line in lines:
        # A part may begin with a space of its own.
        middle = line.find(" ", 1)
        if middle < 0:
            raise _fault(file.path, f"has a merge {line[:40]!r} of one part")
        merges.append([line[:middle], line[middle + 1 :]])
    return merges


def byte_level(
    vocab: Mapping[str, int], merges: list[list[str]], pre: PreTokenizer
) -> dict[str, Any]:
    """Parts of a tokenizer.json whose tokens are bytes, spelled as characters."""
    splits = [
        {
            "type": "Split",
            "pattern": {"Regex": expression},
            "behavior": "Isolated",
            "invert": False,
        }
        for expression in pre.expressions
    ]
    settings = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, settings]},
        "decoder": settings,
        "model": _bpe(vocab, merges, ignore_merges=pre.ignores_merges),
    }


def _sentencepiece(file: GgufFile, tokens: Sequence[str], types: Sequence[int]) -> dict[str, Any]:
    """Pieces with scores, the highest of which are merged first: BPE whose merges are all ways to
    put a piece together from two."""
    scores = file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(tokens):
        raise _fault(file.path, f"has {len(tokens)} tokens, but not as many tokenizer.ggml.scores")
    pieces = {
        token: -float(scores[token_id])
        for token_id, token in enumerate(tokens)
        if types[token_id] in (_NORMAL, _USER_DEFINED, _UNUSED)
    }
    ranked = sorted(
        (rank, token[:i], token[i:])
        for token, rank in pieces.items()
        for i in range(1, len(token))
        if token[:i] in pieces and token[i:] in pieces
    )
    merges = [[left, right] for _, left, right in ranked]
    has_prefix = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    to_pieces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prefix = [{"type": "Prepend", "prepend": _SPACE}] if has_prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    decoders = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        *strip,
    ]
    unknown = _token_id(file, "unknown_token_id")
    has_bytes = _BYTE in types
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, to_pieces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            _ids(tokens),
            merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=has_bytes,
        ),
    }


def _bpe(vocab: Mapping[str, int], merges: list[list[str]], **settings: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **settings,
        "vocab": vocab,
        "merges": merges,
    }
