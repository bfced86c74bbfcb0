"""Progress of loading and fetching: a line that is rewritten on a terminal, lines elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

from lmi_core.units import clock, megabytes

_TERMINAL_INTERVAL_S = 0.1
_LOG_INTERVAL_S = 3.0


class TerminalProgress:
    """Called with what is being done, how many bytes are done and of how many.

    Off a terminal the first line comes after some seconds, so that what is quick stays silent.
    """

    def __init__(
        self,
        out: TextIO | None = None,
        *,
        verb: str = "Loading",
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out = sys.stderr if out is None else out
        self._is_terminal = self._out.isatty()
        self._verb = verb
        self._now = now
        self._what = ""
        self._started = self._shown = 0.0
        self._num_before = 0
        self._width = 0

    def __call__(self, what: str, done: int, total: int) -> None:
        now = self._now()
        if what != self._what:
            self._what, self._started, self._num_before = what, now, done
            self._shown = float("-inf") if self._is_terminal else now
        interval = _TERMINAL_INTERVAL_S if self._is_terminal else _LOG_INTERVAL_S
        is_last = self._is_terminal and done >= total
        if not is_last and now - self._shown < interval:
            return
        self._shown = now
        self._write(self._line(done, total, now - self._started))

    def finish(self) -> None:
        """Wipe the line."""
        if self._width:
            self._out.write("\r" + " " * self._width + "\r")
            self._out.flush()
            self._width = 0

    def say(self, text: str) -> None:
        """Write a line that stays."""
        self._out.write(f"{text}\n")
        self._out.flush()

    def _line(self, done: int, total: int, seconds: float) -> str:
        line = f"{self._verb} {self._what}"
        if not total:
            return line
        line += f" {100 * done // total:3d} % of {megabytes(total)}"
        rate = (done - self._num_before) / seconds if seconds > 0 else 0.0
        if rate:
            line += f", {megabytes(rate)}/s, {clock((total - done) / rate)} left"
        return line

    def _write(self, line: str) -> None:
        if self._is_terminal:
            # What wraps can't be rewritten.
            line = line[: shutil.get_terminal_size().columns - 1]
            self._out.write("\r" + line.ljust(self._width))
            self._width = len(line)
            self._out.flush()
        else:
            self.say(line)
