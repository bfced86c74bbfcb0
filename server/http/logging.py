"""Structured logs on stderr: one line per record, readable or JSON, never a prompt in them."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Callable
from typing import Literal

from lmi_core.text.printable import printable

_FIELDS = "fields"
_PLAIN = re.compile(r"[^\s\"\\\x00-\x1f\x7f-\x9f]+")
access_log = logging.getLogger("lmi_server.http.access")


def setup_logging(log_format: Literal["console", "json"], level: str = "INFO") -> None:
    """Send every record to stderr in the given format."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else ConsoleFormatter())
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    # What gets there is a client's malformed HTTP, with a traceback; the answer says it all.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").setLevel(logging.WARNING)


def set_level(level: str) -> None:
    """Change the least severity that is logged."""
    logging.getLogger().setLevel(level)


def log_access(**fields: object) -> None:
    """One line about an answered request."""
    access_log.info("request", extra={_FIELDS: fields})


class RefusalLog:
    """Access lines of requests that an overloaded server refused: one a second, with the number of
    those that have none, since a refusal must cost little when there are many."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due_s = 0.0
        self._num_silent = 0

    def has_line(self) -> bool:
        """Whether one more refusal gets a line; else it is counted."""
        now_s = self._clock()
        if now_s < self._due_s:
            self._num_silent += 1
            return False
        self._due_s = now_s + 1.0
        return True

    def silent(self) -> dict[str, object]:
        """For the line: how many had none since the last one."""
        count, self._num_silent = self._num_silent, 0
        return {"refused_before": count} if count else {}


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": _timestamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry.update(getattr(record, _FIELDS, {}))
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        text = json.dumps(entry, ensure_ascii=False, default=str)
        # Only inside its strings can there be what isn't printable.
        return text if text.isprintable() else json.dumps(entry, default=str)


class ConsoleFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = getattr(record, _FIELDS, {})
        pairs = "".join(f" {name}={_quoted(value)}" for name, value in fields.items())
        message = printable(record.getMessage())
        line = f"{_timestamp(record.created)} {record.levelname:<7} {message}{pairs}"
        if record.exc_info:
            lines = self.formatException(record.exc_info).split("\n")
            line += "\n" + "\n".join(map(printable, lines))
        return line


def _quoted(value: object) -> str:
    """In quotes where it would else look like more than one value or line."""
    text = str(value)
    if _PLAIN.fullmatch(text) and text.isprintable():
        return text
    return json.dumps(text, ensure_ascii=not text.isprintable())


def _timestamp(seconds: float) -> str:
    whole, milliseconds = divmod(int(seconds * 1000), 1000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)) + f".{milliseconds:03d}Z"
