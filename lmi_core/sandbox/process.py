"""A child as its parent sees it. Calls block: they are made in threads of the pool."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from lmi_core.sandbox import message

_ROOT = Path(__file__).parents[2]
_BOOT = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from lmi_core.sandbox.child import main; sys.exit(main(int(sys.argv[2])))"
)
_KEPT = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "TMPDIR", "TZ")
_SETTINGS = {"TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}


class Ended(Exception):
    """The child has ended; ``by_time``: by its limit of processor time, or by the clock."""

    def __init__(self, *, by_time: bool) -> None:
        super().__init__()
        self.by_time = by_time


class Process:
    """One child, from its start to its end."""

    def __init__(self) -> None:
        self._connection, theirs = socket.socketpair()
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(_ROOT), str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env=environment | _SETTINGS,
                start_new_session=True,
            )
        self.is_last = False
        """It ends after its last answer."""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def call(
        self,
        head: dict[str, Any],
        parts: list[bytes | memoryview],
        *,
        wall_s: float,
        max_bytes: int,
    ) -> tuple[str, Any, list[tuple[str, int, str]]]:
        """Its outcome and what it logged; Ended, MessageTooLongError."""
        try:
            self._connection.settimeout(wall_s)
            message.send(self._connection, message.encode(head))
            message.send(self._connection, parts)
            answer = message.receive(self._connection, max_bytes)
        except TimeoutError:
            self.kill()
            raise Ended(by_time=True) from None
        except (EOFError, OSError):
            self.kill()
            raise Ended(by_time=self._process.returncode == -signal.SIGXCPU) from None
        outcome, value, records, self.is_last = message.decode(answer)
        return outcome, value, records

    def kill(self) -> None:
        """End it and wait for its end. Idempotent; safe from any thread."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        try:
            # One that was ended by a limit says so.
            self._process.wait(0.05)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._connection.close()
