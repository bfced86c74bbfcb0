"""Token ids to text as they arrive, never half a character."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

from lmi_core.text.token_bytes import TokenBytes

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CONTEXT_TOKENS = 6
"""Tokens decoded again as left context, where a tokenizer's decoder looks at neighbours."""
_MAX_HELD_TOKENS = 16
"""A character has at most four bytes; longer runs without one are not the start of a character."""

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """Text of one choice: the pushed pieces and the flush joined are the text of its tokens."""

    def push(self, token_id: int) -> str:
        """The characters that this token completed."""
        ...

    def flush(self) -> str:
        """What is left when no more tokens come; half a character becomes U+FFFD."""
        ...


class ByteDetokenizer:
    """For decoders that concatenate fixed bytes per token: one lookup per token, whose text is
    known unless it is, or follows, a part of a character."""

    __slots__ = ("_decoder", "_holds_part", "_skipped", "_texts", "_token_bytes")

    def __init__(self, token_bytes: TokenBytes, skipped_ids: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._texts = token_bytes.texts
        self._skipped = skipped_ids
        self._decoder = _Utf8Decoder("replace")
        self._holds_part = False

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        follows_part = self._holds_part
        if not follows_part and (known := self._texts.get(token_id)) is not None:
            return known
        text = self._decoder.decode(self._token_bytes[token_id])
        self._holds_part = bool(self._decoder.getstate()[0])
        if not (follows_part or self._holds_part):
            self._texts[token_id] = text
        return text

    def flush(self) -> str:
        self._holds_part = False
        return self._decoder.decode(b"", True)


class WindowDetokenizer:
    """For every other decoder: decodes a short window of tokens with and without the new ones."""

    __slots__ = ("_decode", "_num_context", "_skipped", "_window")

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        skipped_ids: frozenset[int],
        context: Sequence[int] = (),
    ) -> None:
        """``context``: the tokens before the first one pushed, of which the last few are used."""
        self._decode = decode
        self._skipped = skipped_ids
        self._window = list(context[-_CONTEXT_TOKENS:])
        self._num_context = len(self._window)

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._new_text()
        if not text:
            return ""
        if text.endswith(_REPLACEMENT) and (
            len(self._window) - self._num_context < _MAX_HELD_TOKENS
        ):
            return ""
        self._window = self._window[-_CONTEXT_TOKENS:]
        self._num_context = len(self._window)
        return text

    def flush(self) -> str:
        text = self._new_text()
        self._num_context = len(self._window)
        return text

    def _new_text(self) -> str:
        before = self._decode(self._window[: self._num_context])
        return self._decode(self._window)[len(before) :]
