"""A server started for a measurement: waited for, watched, stopped."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_POLL_S = 0.005
_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 30.0
_PING = b"GET /ping HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@dataclass(frozen=True, slots=True)
class ServerProcess:
    pid: int
    port: int
    start_s: float
    """From the creation of the process to the first /ping that was answered with 200."""


@contextmanager
def started(command: Sequence[str]) -> Iterator[ServerProcess]:
    """A running server; ``command`` takes ``--host`` and ``--port``."""
    port = _free_port()
    begin = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port)], stdout=subprocess.DEVNULL
    )
    try:
        _wait_until_ready(process, port)
        yield ServerProcess(process.pid, port, time.perf_counter() - begin)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _wait_until_ready(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not _answers_ping(port):
        if process.poll() is not None:
            raise SystemExit(f"the server ended with exit code {process.returncode}")
        if time.monotonic() > deadline:
            raise SystemExit(f"the server was not ready after {_START_TIMEOUT_S:g} s")
        time.sleep(_POLL_S)


def _answers_ping(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
            client.sendall(_PING)
            return client.recv(4096).startswith(b"HTTP/1.1 200 ")
    except OSError:
        return False


def cpu_ns(pid: int) -> int:
    """Processor time of all threads of a process that still run, user and system."""
    # schedstat counts in nanoseconds, where stat has ticks of 10 ms: too coarse for 0.2 % of 30 s.
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)
