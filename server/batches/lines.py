"""The lines of a batch's input: what each asks for, and what is wrong with one."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

MESSAGES = "/v1/messages"
"""Of what Anthropic's batches ask."""
MAX_LINES = 50_000
_MAX_LINE_BYTES = 4 << 20
_MAX_ERRORS = 20
_MAX_ID_CHARS = 512


class Line(NamedTuple):
    custom_id: str
    body: bytes


class _Line(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


_DECODER = msgspec.json.Decoder(_Line)


def check(path: Path, endpoint: str) -> tuple[int, list[dict[str, Any]]]:
    """How many requests there are, and what is wrong with them, as a batch's errors say it."""
    errors: list[dict[str, Any]] = []
    seen: set[str] = set()
    with path.open("rb") as file:
        for number, data in enumerate(iter(lambda: file.readline(_MAX_LINE_BYTES + 1), b""), 1):
            fault = _fault(data, endpoint, seen)
            if fault is not None:
                code, message, param = fault
                errors.append({"code": code, "line": number, "message": message, "param": param})
            if len(seen) > MAX_LINES or len(errors) >= _MAX_ERRORS or len(data) > _MAX_LINE_BYTES:
                break
    if len(seen) > MAX_LINES:
        errors.append(_whole_fault("too_many_tasks", f"more than {MAX_LINES} requests"))
    if not seen and not errors:
        errors.append(_whole_fault("empty_file", "the input file has no requests"))
    return len(seen), errors


def _whole_fault(code: str, message: str) -> dict[str, Any]:
    return {"code": code, "line": None, "message": message, "param": None}


def _fault(data: bytes, endpoint: str, seen: set[str]) -> tuple[str, str, str | None] | None:
    if not data.strip():
        return None
    if len(data) > _MAX_LINE_BYTES:
        return "line_too_long", f"a line has at most {_MAX_LINE_BYTES} bytes", None
    try:
        line = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return "invalid_json_line", str(error), None
    if line.url != endpoint:
        return "mismatched_url", f"url must be the batch's endpoint {endpoint}", "url"
    if line.method != "POST":
        return "invalid_method", "method must be POST", "method"
    if not 0 < len(line.custom_id) <= _MAX_ID_CHARS:
        message = f"custom_id must have 1 to {_MAX_ID_CHARS} characters"
        return "invalid_custom_id", message, "custom_id"
    if line.custom_id in seen:
        return "duplicate_custom_id", f"{line.custom_id[:80]!r} was there before", "custom_id"
    seen.add(line.custom_id)
    return None


class Lines:
    """The lines of a checked file, some at a time; for threads."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._lines: Iterator[bytes] = filter(bytes.strip, self._file)

    def some(self, most: int = 16) -> list[Line]:
        """The next ones; none: that was all."""
        decoded = (_DECODER.decode(data) for data in islice(self._lines, most))
        return [Line(line.custom_id, bytes(line.body)) for line in decoded]

    def close(self) -> None:
        self._file.close()


def answer_line(custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """A line of the output, or of errors for a status over 299."""
    head = {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "response": {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)},
        "error": None,
    }
    # A line's end can only be between the parts of JSON.
    return msgspec.json.encode(head).replace(b"\r", b" ").replace(b"\n", b" ") + b"\n"


def is_unsent(line: bytes) -> bool:
    """Whether a line of errors is of a request that was never sent."""
    return b'"response":null' in line


def failure_line(custom_id: str, code: str, message: str) -> bytes:
    """A line of errors for a request that was never sent."""
    fields = {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "response": None,
        "error": {"code": code, "message": message},
    }
    return msgspec.json.encode(fields) + b"\n"
