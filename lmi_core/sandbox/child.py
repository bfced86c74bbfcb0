"""The child: takes calls, one at a time, and answers, within the limits that each call brings."""

from __future__ import annotations

import logging
import resource
import socket
import sys
from pathlib import Path
from typing import Any

from lmi_core.errors import EngineError
from lmi_core.sandbox import message

_MAX_CALL_BYTES = 1 << 40
_MAX_LOG_RECORDS = 100
_MAX_RESIDENT_BYTES = 768 << 20
"""A child that has ever been larger ends after its answer, which gives its memory back."""


class _Records(logging.Handler):
    """Keeps what is logged, for the parent to log it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.kept: list[tuple[str, int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if len(self.kept) < _MAX_LOG_RECORDS:
            self.kept.append((record.name, record.levelno, record.getMessage()))


def main(descriptor: int) -> int:
    """Serve the socket ``descriptor`` until its other end is closed."""
    connection = socket.socket(fileno=descriptor)
    records = _Records()
    logging.getLogger().addHandler(records)
    while True:
        try:
            head = message.decode(message.receive(connection, _MAX_CALL_BYTES))
            parts = message.receive(connection, _MAX_CALL_BYTES)
        except (EOFError, ConnectionError):
            return 0
        records.kept.clear()
        outcome = _run(parts, **head)
        is_last = _peak_bytes() > _MAX_RESIDENT_BYTES
        try:
            message.send(connection, _encoded(outcome, records.kept, is_last))
        except (MemoryError, ConnectionError):
            return 1
        if is_last:
            return 0


def _encoded(
    outcome: tuple[str, Any], records: list[tuple[str, int, str]], is_last: bool
) -> list[bytes | memoryview]:
    try:
        return message.encode((*outcome, records, is_last))
    except (MemoryError, ConnectionError):
        raise
    except Exception as error:  # what a function has made can't be pickled
        failure = message.raised(EngineError(f"the child's result can't be sent: {error}"))
        return message.encode(("error", failure, records, is_last))


def _run(
    parts: list[bytearray], *, processor_s: int, memory_bytes: int, known: Any
) -> tuple[str, Any]:
    """``result`` and the value, ``error`` and an exception's parts, or ``memory``."""
    used_s = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    _limit(resource.RLIMIT_CPU, int(used_s) + 1 + processor_s)
    _limit(resource.RLIMIT_DATA, _data_bytes() + memory_bytes)
    try:
        function, arguments = message.decode(parts, known=known)
        return "result", function(*arguments)
    except MemoryError:
        return "memory", None
    except Exception as error:
        return "error", message.raised(error)
    finally:
        _limit(resource.RLIMIT_DATA, resource.RLIM_INFINITY)


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY and (value == resource.RLIM_INFINITY or value > hard):
        value = hard
    resource.setrlimit(kind, (value, hard))


def _peak_bytes() -> int:
    """The largest this program has been; ``ru_maxrss`` counts what its parent was, too."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def _data_bytes() -> int:
    """Private writable memory that the process has reserved, which is what RLIMIT_DATA counts."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
