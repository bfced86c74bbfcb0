"""The bytes that each token stands for, where a tokenizer's decoder only concatenates them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_META_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


class TokenBytes(dict[int, bytes]):
    """Token id -> bytes, computed when first asked for."""

    def __init__(self, token_of: Callable[[int], str | None], to_bytes: Callable[[str], bytes]):
        super().__init__()
        self._token_of = token_of
        self._to_bytes = to_bytes
        self.texts: dict[int, str] = {}
        """Of those that were decoded where no character was begun, and begin none themselves."""

    def __missing__(self, token_id: int) -> bytes:
        token = self._token_of(token_id)
        value = b"" if token is None else self._to_bytes(token)
        self[token_id] = value
        return value


def byte_rule(decoder: Mapping[str, Any] | None) -> Callable[[str], bytes] | None:
    """The rule from token to bytes for a tokenizer.json's ``decoder``; None if neighbours matter.

    Known are byte-level BPE (GPT-2, Llama 3, Qwen) and SentencePiece BPE with byte fallback
    (Llama 2, Mistral). The latter's decoder also drops one space at the start of a text: generated
    text continues a prompt, so here it stays.
    """
    if decoder is None:
        return None
    steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level_bytes
    if kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        replace = steps[0]
        if replace.get("pattern") == {"String": _META_SPACE} and replace.get("content") == " ":
            return _byte_fallback_bytes
    return None


def _printable_bytes() -> dict[str, int]:
    """The byte-to-character table of GPT-2's tokenizer, inverted: printable Latin-1 stands for
    itself, the others for U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return table


BYTE_OF_CHAR = _printable_bytes()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([BYTE_OF_CHAR[char] for char in token])
    except KeyError:  # an added token, which stands for its own text
        return token.encode()


def _byte_fallback_bytes(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    if match:
        return bytes([int(match[1], 16)])
    return token.replace(_META_SPACE, " ").encode()
