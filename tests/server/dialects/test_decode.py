"""What is wrong with a body, by name and with what is allowed."""

from __future__ import annotations

from typing import Literal

import msgspec
import pytest

from lmi_core.errors import UserError
from lmi_server.dialects.decode import convert, decode_json
from lmi_server.dialects.openai.embeddings import EmbeddingsBody


class _Inner(msgspec.Struct):
    side: Literal["left", "right"] | None = None


class _Body(msgspec.Struct):
    inner: list[_Inner] = []
    named: dict[str, _Inner] = {}


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        (
            EmbeddingsBody,
            b'{"input": "x", "encoding_format": "int8"}',
            "encoding_format is 'int8'; allowed are 'base64', 'float'",
        ),
        (
            EmbeddingsBody,
            b'{"input": "x", "truncate_prompt_tokens": 5}',
            "truncate_prompt_tokens is 5; allowed are -1",
        ),
        (_Body, b'{"inner": [{}, {"side": "up"}]}', "inner[1].side is 'up'; allowed are 'left'"),
        (_Body, b'{"named": {"a": {"side": "up"}}}', "side is 'up'; allowed are 'left', 'right'"),
    ],
)
def test_a_choice_that_there_is_not(kind: type, body: bytes, message: str) -> None:
    with pytest.raises(UserError) as caught:
        decode_json(msgspec.json.Decoder(kind), body)
    assert message in str(caught.value)


def test_a_long_choice_is_cut() -> None:
    with pytest.raises(UserError) as caught:
        convert({"side": "x" * 100_000}, _Inner, name="inner")
    assert str(caught.value).startswith("inner.side is 'xxx")
    assert len(str(caught.value)) < 200
