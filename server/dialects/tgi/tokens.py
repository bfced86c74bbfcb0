"""Answers of TGI's tokenizing routes: tokens with their places in the text, in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from lmi_core.text.tokenizer import TokenSpan
from lmi_server.dialects.tgi.compact_json import array, quote


def token_array(text: str, spans: Sequence[TokenSpan]) -> bytes:
    """``[{"id","text","start","stop"}]``; tokens that aren't in the text have 0, 0 and no text."""
    places = None if text.isascii() else [0, *accumulate(len(char.encode()) for char in text)]

    def token(span: TokenSpan) -> str:
        start, stop = span.start, span.stop
        piece = quote(text[start:stop])
        if places is not None:
            start, stop = places[start], places[stop]
        return f'{{"id":{span.token_id},"text":{piece},"start":{start},"stop":{stop}}}'

    return array(token(span) for span in spans).encode("utf-8", "replace")


def chat_tokens(text: str, spans: Sequence[TokenSpan]) -> bytes:
    """The tokens of a chat's prompt, and the prompt."""
    tokens = token_array(text, spans)
    prompt = quote(text).encode("utf-8", "replace")
    return b'{"tokenize_response":' + tokens + b',"templated_text":' + prompt + b"}"
