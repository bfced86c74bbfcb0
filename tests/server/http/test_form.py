"""Fields of forms, whatever their length."""

from __future__ import annotations

import asyncio
from urllib.parse import parse_qsl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmi_server.dialects.base import HttpError
from lmi_server.http import form

URL_ENCODED = "application/x-www-form-urlencoded"
MULTIPART = "multipart/form-data; boundary=x"


def items(content_type: str, body: bytes) -> list[tuple[str, bytes]] | None:
    return asyncio.run(form.form_items(content_type, body))


@pytest.fixture(params=[3, 8, 1 << 20])
def piece(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_SMALL_BYTES", "_PIECE_BYTES"):
        monkeypatch.setattr(form, name, request.param)


@pytest.mark.usefixtures("piece")
def test_url_encoded() -> None:
    @given(st.text("a%4F+=&\u00e9", max_size=40))
    def check(text: str) -> None:
        pairs = parse_qsl(text, keep_blank_values=True, encoding="latin-1")
        body = text.encode("latin-1")
        expected = [(k.encode("latin-1").decode("utf-8", "replace"), v) for k, v in pairs]
        found = items(URL_ENCODED, body)
        assert found == [(name, value.encode("latin-1")) for name, value in expected]

    check()


@pytest.mark.usefixtures("piece")
def test_multipart() -> None:
    @given(st.lists(st.binary(max_size=12) | st.text("\r\n-x", max_size=9)), st.booleans())
    def check(values: list[bytes | str], has_preamble: bool) -> None:
        given_values = [v.encode() if isinstance(v, str) else v for v in values]
        wanted = [value for value in given_values if b"\r\n--x" not in b"\r\n" + value]
        head = b'--x\r\nContent-Disposition: form-data; name="%d"\r\n\r\n'
        parts = [head % i + value + b"\r\n" for i, value in enumerate(wanted)]
        body = b"pre\r\n" * has_preamble + b"".join(parts) + b"--x--\r\n"
        assert items(MULTIPART, body) == [(str(i), value) for i, value in enumerate(wanted)]

    check()


@pytest.mark.parametrize(
    ("content_type", "body", "words"),
    [
        (URL_ENCODED, b"a" * 20_000, "the name of field 0 is longer than 16384 bytes"),
        (URL_ENCODED, b"&" * 1000, "more than 1000 fields"),
        (MULTIPART, b"--x\r\nContent-Disposition:" + b"a" * 20_000 + b"\r\n--x--", "field 0 is"),
        (MULTIPART, b"--x\r\n" * 1002 + b"--x--", "more than 1000 fields"),
        (MULTIPART, b"nothing", "last boundary"),
    ],
)
def test_what_is_refused(content_type: str, body: bytes, words: str) -> None:
    with pytest.raises(HttpError, match=words):
        items(content_type, body)


def test_how_many_are_taken() -> None:
    found = items(URL_ENCODED, b"a=1&" * 999 + b"b=2")
    assert found is not None
    assert len(found) == 1000
