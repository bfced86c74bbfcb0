"""Requests as content items: of forms one per field, in their order, else the body.

A form may be as long as any body: what takes long is done a piece at a time, in a thread, so that
no call holds the interpreter's lock for long.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from email.message import Message
from urllib.parse import unquote_to_bytes

from aiohttp import web

from lmi_core.custom_code.call import HandlerRequest
from lmi_server.dialects.base import HttpError
from lmi_server.http.properties import sent_properties

_MAX_FIELDS = 1000
_MAX_HEAD_BYTES = 16_384
_SMALL_BYTES = 64 * 1024
_PIECE_BYTES = 1 << 20
_NAME = re.compile(rb'(?im)^content-disposition:[^\r\n]*?[;\s]name="((?:[^"\\]|\\.)*)"')
_BARE_NAME = re.compile(rb"(?im)^content-disposition:[^\r\n]*?[;\s]name=([^\s;\"]+)")


async def handler_request(request: web.Request, body: bytes) -> HandlerRequest:
    """A request as a model's own code gets it (DJL-Serving's RequestParser.java); HttpError for a
    broken form."""
    items = [(name, value.encode("utf-8", "replace")) for name, value in request.query.items()]
    form = await form_items(request.headers.get("Content-Type", ""), body)
    items += [("data", body)] if form is None else form
    return HandlerRequest(properties=sent_properties(request.headers), content=items)


async def form_items(content_type: str, body: bytes) -> list[tuple[str, bytes]] | None:
    """The fields of a form, or None for any other content type; HttpError when it is broken."""
    message = Message()
    message["Content-Type"] = content_type
    match message.get_content_type():
        case "application/x-www-form-urlencoded" if content_type:
            boundary = b""
        case "multipart/form-data":
            named = message.get_param("boundary")
            if not isinstance(named, str) or not named:
                raise _broken("its Content-Type names no boundary")
            boundary = named.encode("utf-8", "replace")
        case _:
            return None
    if len(body) <= _SMALL_BYTES:
        return _items(boundary, body)
    return await asyncio.to_thread(_items, boundary, body)


def _items(boundary: bytes, body: bytes) -> list[tuple[str, bytes]]:
    """``boundary``: empty for a form that is encoded as a URL's query is."""
    return _multipart(boundary, body) if boundary else _url_encoded(body)


def _url_encoded(body: bytes) -> list[tuple[str, bytes]]:
    items: list[tuple[str, bytes]] = []
    for begin, end in _split(body, b"&", 0, _MAX_FIELDS):
        if begin == end:
            continue
        equals = _find(body, b"=", begin, end)
        _check_head(equals - begin, len(items))
        name = _unquoted(body, begin, equals).decode("utf-8", "replace")
        items.append((name, _unquoted(body, min(equals + 1, end), end)))
    return items


def _multipart(boundary: bytes, body: bytes) -> list[tuple[str, bytes]]:
    """Raw bytes of each part; the parts' own content types are dropped."""
    delimiter = b"\r\n--" + boundary
    # The first delimiter has no line before it where nothing precedes the parts.
    is_first = body.startswith(delimiter[2:])
    begin = len(delimiter) - 2 if is_first else 0
    parts = list(_split(body, delimiter, begin, _MAX_FIELDS + 2))[0 if is_first else 1 :]
    if not parts or not body.startswith(b"--", parts[-1][0]):
        raise _broken("its last boundary is missing")
    items: list[tuple[str, bytes]] = []
    for begin, end in parts[:-1]:
        head_end = body.find(b"\r\n\r\n", begin, min(end, begin + _MAX_HEAD_BYTES))
        if head_end < 0:
            _check_head(end - begin, len(items))
        head = body[begin : max(begin, head_end)]
        name = _NAME.search(head) or _BARE_NAME.search(head)
        if name is None:
            raise _broken(f"part {len(items)} has no name")
        items.append((name[1].decode("utf-8", "replace"), _copied(body, head_end + 4, end)))
    return items


def _split(body: bytes, delimiter: bytes, begin: int, most: int) -> Iterator[tuple[int, int]]:
    """Where what lies between delimiters begins and ends; HttpError for more than ``most``."""
    for _ in range(most):
        end = _find(body, delimiter, begin, len(body))
        yield begin, end
        if end == len(body):
            return
        begin = end + len(delimiter)
    raise _broken(f"it has more than {_MAX_FIELDS} fields")


def _find(body: bytes, what: bytes, begin: int, end: int) -> int:
    """Where ``what`` is first, or ``end``."""
    for start in range(begin, end, _PIECE_BYTES):
        found = body.find(what, start, min(end, start + _PIECE_BYTES + len(what) - 1))
        if found >= 0:
            return found
    return end


def _copied(body: bytes, begin: int, end: int) -> bytes:
    """Joining leaves others the lock, slicing doesn't."""
    starts = range(begin, end, _PIECE_BYTES)
    return b"".join([body[start : min(end, start + _PIECE_BYTES)] for start in starts])


def _unquoted(body: bytes, begin: int, end: int) -> bytes:
    pieces = []
    while begin < end:
        stop = min(end, begin + _SMALL_BYTES)
        if stop < end:
            # An escape is not cut.
            cut = body.rfind(b"%", stop - 2, stop)
            stop = stop if cut < 0 else cut
        pieces.append(unquote_to_bytes(body[begin:stop].replace(b"+", b" ")))
        begin = stop
    return b"".join(pieces)


def _check_head(num_bytes: int, number: int) -> None:
    if num_bytes > _MAX_HEAD_BYTES:
        raise _broken(f"the name of field {number} is longer than {_MAX_HEAD_BYTES} bytes")


def _broken(why: str) -> HttpError:
    return HttpError(400, "BadRequestException", f"The form can't be read: {why}")
