"""Progress of a download: what several threads have received."""

from __future__ import annotations

import threading
from typing import TextIO

from lmi_core.progress import TerminalProgress
from lmi_core.units import megabytes


class Progress:
    """Counts the bytes of a download; announces its size and its end."""

    def __init__(self, what: str, stream: TextIO | None = None) -> None:
        self._what = what
        self._show = TerminalProgress(stream, verb="Fetching")
        self._lock = threading.Lock()
        self._done_bytes = self._total_bytes = 0

    def start(self, total_bytes: int) -> None:
        """Say how much there is to do."""
        with self._lock:
            self._total_bytes = total_bytes
            self._show.say(f"{self._what}: {megabytes(total_bytes)} to fetch")
            self._show(self._what, 0, total_bytes)

    def add(self, num_bytes: int) -> None:
        """Count bytes that have arrived, or that were here already."""
        with self._lock:
            self._done_bytes += num_bytes
            self._show(self._what, self._done_bytes, self._total_bytes)

    def finish(self) -> None:
        """Say that everything is here."""
        self._show.finish()
        self._show.say(f"{self._what}: complete, {megabytes(self._done_bytes)}")
