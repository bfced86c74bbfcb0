"""How few tokens a text can have: a bound for every text, where tokenizer.json proves one.

Every character must end in some token, and a token stands for at most as many characters as the
longest entry of the vocabulary has. That is so for byte-pair encoding with all 256 bytes in the
vocabulary, if nothing takes characters away before: no normalizer but those that make text longer,
no pre-tokenizer that drops what it splits at, no added token that swallows the blanks beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmi_core.text.token_bytes import BYTE_OF_CHAR

Part = Mapping[str, Any]


def max_token_chars(tokenizer: Part) -> int | None:
    """Characters that one token can stand for; None if it isn't known.

    ``tokenizer``: the content of tokenizer.json.
    """
    model = tokenizer["model"]
    added = tokenizer.get("added_tokens") or []
    vocabulary = model.get("vocab")
    if model.get("type") != "BPE" or not isinstance(vocabulary, Mapping) or not vocabulary:
        return None
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    splitters = _parts(tokenizer.get("pre_tokenizer"), "pretokenizers")
    normalizers = _parts(tokenizer.get("normalizer"), "normalizers")
    if not (all(map(_drops_nothing, splitters)) and all(map(_shortens_nothing, normalizers))):
        return None
    if any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    if not _has_all_bytes(model, vocabulary, splitters):
        return None
    # Byte-level entries have a character for each byte, others for each character.
    return max(map(len, [*vocabulary, *(token["content"] for token in added)]))


def _parts(part: Part | None, name: str) -> list[Part]:
    """A part, or those of a sequence of them."""
    if part is None:
        return []
    if part.get("type") != "Sequence":
        return [part]
    return [inner for each in part[name] for inner in _parts(each, name)]


def _drops_nothing(part: Part) -> bool:
    if part.get("type") in ("Split", "Punctuation"):
        return part.get("behavior") != "Removed"
    return part.get("type") in ("ByteLevel", "Digits", "Metaspace")


def _shortens_nothing(part: Part) -> bool:
    if part.get("type") == "Replace":
        pattern = part.get("pattern", {}).get("String")
        return bool(pattern) and len(part.get("content", "")) >= len(pattern)
    return part.get("type") == "Prepend"


def _has_all_bytes(model: Part, vocabulary: Part, splitters: list[Part]) -> bool:
    """Whether no character can be unknown."""
    if any(part.get("type") == "ByteLevel" for part in splitters):
        return all(char in vocabulary for char in BYTE_OF_CHAR)
    return bool(model.get("byte_fallback")) and all(
        f"<0x{value:02X}>" in vocabulary for value in range(256)
    )
