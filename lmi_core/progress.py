"""Progress of loading, on one line of a terminal."""

from __future__ import annotations

import sys
import time
from typing import TextIO


class TerminalProgress:
    """Called with what is loading, how much is done and of how much; silent off a terminal."""

    _INTERVAL_S = 0.1

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = sys.stderr if out is None else out
        self._is_terminal = self._out.isatty()
        self._shown = 0.0
        self._width = 0

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if not self._is_terminal or (done < total and now - self._shown < self._INTERVAL_S):
            return
        self._shown = now
        share = f" {100 * done // total:3d} %" if total else ""
        line = f"Loading {what}{share}"
        self._out.write("\r" + line.ljust(self._width))
        self._out.flush()
        self._width = len(line)

    def finish(self) -> None:
        """Wipe the line."""
        if self._width:
            self._out.write("\r" + " " * self._width + "\r")
            self._out.flush()
            self._width = 0
