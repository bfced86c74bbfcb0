"""A SentencePiece model, ``tokenizer.model``, without the library that writes it.

Format: sentencepiece_model.proto; its messages are read as protocol buffers' wire format says.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lmi_core.errors import ModelError
from lmi_core.files import read_bytes

_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_PIECE, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE, _CHARSMAP, _ADDS_PREFIX, _REMOVES_SPACES = 3, 2, 3, 4
_NORMAL, _BPE = 1, 2
_MODEL_TYPES = {1: "unigram", 3: "word", 4: "char"}
_IDS = {40: ("unknown", 0), 41: ("bos", 1), 42: ("eos", 2), 43: ("padding", -1)}
"""Of special tokens, by their fields: their names in GGUF, and what they are by default."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED = {_FIXED64: 8, _FIXED32: 4}


@dataclass(frozen=True, slots=True)
class SentencePieceFile:
    """What it holds, by the names that GGUF files have for it, and what text goes through first."""

    path: Path
    metadata: dict[str, Any]
    charsmap: bytes
    """What characters are replaced by, as the tokenizers library takes it."""
    removes_spaces: bool
    """At both ends, and all but one between words."""


def read_sentencepiece(path: Path) -> SentencePieceFile:
    """Raises ModelError for a file that is damaged, or whose pieces aren't merged in pairs."""
    try:
        return _read(path)
    except (IndexError, KeyError, TypeError, ValueError, struct.error):
        raise ModelError(
            f"{path} is no SentencePiece model: fetch it again, or put a tokenizer.json beside it",
            field=path.name,
        ) from None


def _read(path: Path) -> SentencePieceFile:
    pieces: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, message in _fields(read_bytes(path)):
        if number == _PIECES:
            piece = dict(_fields(message))
            pieces.append(piece[_PIECE].decode())
            scores.append(struct.unpack("<f", piece.get(_SCORE, bytes(4)))[0])
            types.append(piece.get(_TYPE, _NORMAL))
        elif number == _TRAINER:
            trainer = dict(_fields(message))
        elif number == _NORMALIZER:
            normalizer = dict(_fields(message))
    if (kind := trainer.get(_MODEL_TYPE, 1)) != _BPE:
        name = _MODEL_TYPES.get(kind, str(kind))
        raise ModelError(
            f"{path} is a SentencePiece model of type {name}; of type bpe they are read, of others "
            "a tokenizer.json is needed beside it",
            field=path.name,
        )
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.add_space_prefix": bool(normalizer.get(_ADDS_PREFIX, True)),
    }
    for number, (name, default) in _IDS.items():
        token_id = trainer.get(number, default)
        if 0 <= token_id < len(pieces):  # 64 bits of a negative one are a large number
            metadata[f"tokenizer.ggml.{name}_token_id"] = token_id
    return SentencePieceFile(
        path,
        metadata,
        charsmap=normalizer.get(_CHARSMAP, b""),
        removes_spaces=bool(normalizer.get(_REMOVES_SPACES, True)),
    )


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Numbers and values of a message's fields: integers, or bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if kind == _BYTES:
            size, at = _varint(data, at)
        else:
            size = _FIXED[kind]
        if at + size > len(data):
            raise ValueError
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at + shift // 7]
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at + shift // 7 + 1
    raise ValueError
