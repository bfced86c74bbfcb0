"""Processes of engines: started with their own group and log, stopped whole."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STOP_S = 10.0
REPOSITORY = Path(__file__).resolve().parents[2]


class SideError(RuntimeError):
    """An engine's process didn't start, died, or answered with an error."""


@dataclass(frozen=True, slots=True)
class Command:
    """``environment`` is added to this process's own."""

    arguments: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)


class EngineProcess:
    """A child in a process group of its own; stderr goes to the command's log."""

    def __init__(self, command: Command, *, stdout_to_log: bool = False) -> None:
        self._log = command.log
        command.log.parent.mkdir(parents=True, exist_ok=True)
        with command.log.open("wb") as log:
            self._process = subprocess.Popen(
                list(command.arguments),
                cwd=REPOSITORY,
                env=os.environ | dict(command.environment),
                stdin=subprocess.PIPE,
                stdout=log if stdout_to_log else subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self._unread = b""

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def died(self) -> SideError:
        """The error that says so, with the end of the log."""
        tail = self._log.read_text(errors="replace").strip().splitlines()[-3:]
        code = self._process.poll()
        return SideError(f"exited with {code}; {self._log} ends with: {' | '.join(tail)}")

    def send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self.died() from None

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """The next line's object."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            self._unread += self._read(deadline)
        line, self._unread = self._unread.split(b"\n", 1)
        message: dict[str, Any] = json.loads(line)
        return message

    def _read(self, deadline: float) -> bytes:
        assert self._process.stdout is not None
        wait_s = max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select([self._process.stdout], [], [], wait_s)
        if not ready:
            raise SideError(f"no answer in time, see {self._log}")
        data = os.read(self._process.stdout.fileno(), 1 << 16)
        if not data:
            self._process.wait(STOP_S)
            raise self.died()
        return data

    def stop(self) -> None:
        """Ask, then terminate, then kill the whole group."""
        with contextlib.suppress(BrokenPipeError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
        if self._process.stdout is not None:
            self._process.stdout.close()
