"""Requests as content items: of forms one per field, in their order, else the body."""

from __future__ import annotations

import re
from email.message import Message
from urllib.parse import parse_qsl

from aiohttp import web

from lmi_core.custom_code.call import HandlerRequest
from lmi_server.dialects.base import HttpError
from lmi_server.http.properties import sent_properties

_MAX_FIELDS = 1000
_NAME = re.compile(rb'(?i)content-disposition:[^\r\n]*?[;\s]name="((?:[^"\\]|\\.)*)"')
_BARE_NAME = re.compile(rb"(?i)content-disposition:[^\r\n]*?[;\s]name=([^\s;\"]+)")


def handler_request(request: web.Request, body: bytes) -> HandlerRequest:
    """A request as a model's own code gets it (LMI format reference, 3.4); HttpError for a broken
    form."""
    items = [(name, value.encode("utf-8", "replace")) for name, value in request.query.items()]
    form = form_items(request.headers.get("Content-Type", ""), body)
    items += [("data", body)] if form is None else form
    return HandlerRequest(properties=sent_properties(request.headers), content=items)


def form_items(content_type: str, body: bytes) -> list[tuple[str, bytes]] | None:
    """The fields of a form, or None for any other content type; HttpError when it is broken."""
    message = Message()
    message["Content-Type"] = content_type
    match message.get_content_type():
        case "application/x-www-form-urlencoded" if content_type:
            return _url_encoded(body)
        case "multipart/form-data":
            boundary = message.get_param("boundary")
            if not isinstance(boundary, str) or not boundary:
                raise _broken("its Content-Type names no boundary")
            return _multipart(boundary.encode("utf-8", "replace"), body)
    return None


def _url_encoded(body: bytes) -> list[tuple[str, bytes]]:
    try:
        # Latin-1 maps every byte to a character and back.
        pairs = parse_qsl(
            body.decode("latin-1"),
            keep_blank_values=True,
            encoding="latin-1",
            max_num_fields=_MAX_FIELDS,
        )
    except ValueError:
        raise _broken(f"it has more than {_MAX_FIELDS} fields") from None
    return [
        (name.encode("latin-1").decode("utf-8", "replace"), value.encode("latin-1"))
        for name, value in pairs
    ]


def _multipart(boundary: bytes, body: bytes) -> list[tuple[str, bytes]]:
    """Raw bytes of each part; the parts' own content types are dropped."""
    delimiter = b"\r\n--" + boundary
    parts = (b"\r\n" + body).split(delimiter, _MAX_FIELDS + 1)
    if len(parts) > _MAX_FIELDS + 1:
        raise _broken(f"it has more than {_MAX_FIELDS} fields")
    if len(parts) < 2 or not parts[-1].startswith(b"--"):
        raise _broken("its last boundary is missing")
    items: list[tuple[str, bytes]] = []
    for part in parts[1:-1]:
        head, separator, value = part.partition(b"\r\n\r\n")
        name = _NAME.search(head) or _BARE_NAME.search(head)
        if not separator or name is None:
            raise _broken(f"part {len(items)} has no name")
        items.append((name[1].decode("utf-8", "replace"), value))
    return items


def _broken(why: str) -> HttpError:
    return HttpError(400, "BadRequestException", f"The form can't be read: {why}")
