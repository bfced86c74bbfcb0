"""Progress of a download, as lines that suit a log as well as a terminal."""

from __future__ import annotations

import sys
import threading
import time
from typing import TextIO

_INTERVAL_S = 2.0
_MEBIBYTE = 1 << 20


class Progress:
    """Counts bytes of a download from several threads and writes a line every two seconds."""

    def __init__(self, what: str, stream: TextIO | None = None) -> None:
        self._what = what
        self._stream = sys.stderr if stream is None else stream
        self._lock = threading.Lock()
        self._done_bytes = self._total_bytes = 0
        self._last_s = 0.0

    def start(self, total_bytes: int) -> None:
        """Say how much there is to do."""
        with self._lock:
            self._total_bytes = total_bytes
        self._write(f"{total_bytes / _MEBIBYTE:.1f} MiB to fetch")

    def add(self, num_bytes: int) -> None:
        """Count bytes that have arrived, or that were here already."""
        with self._lock:
            self._done_bytes += num_bytes
            now = time.monotonic()
            if now - self._last_s < _INTERVAL_S:
                return
            self._last_s = now
            done, total = self._done_bytes, self._total_bytes
        percent = 100 * done / total if total else 100.0
        self._write(f"{done / _MEBIBYTE:.1f} of {total / _MEBIBYTE:.1f} MiB ({percent:.0f} %)")

    def finish(self) -> None:
        """Say that everything is here."""
        self._write(f"complete, {self._done_bytes / _MEBIBYTE:.1f} MiB")

    def _write(self, text: str) -> None:
        self._stream.write(f"{self._what}: {text}\n")
        self._stream.flush()
