"""Ranks in processes that mpirun, srun or torchrun have started on this machine.

Each of a job's processes but the first is a host: it listens on an abstract Unix socket, whose name
follows from the job's, and starts a rank's process whenever the first process, or one of its
copies, hands it the socket over which that rank is told what to do. So a rank has the cores, limits
and variables that the job gave it, and several models, copies, and another rank in a lost one's
place need nothing more. A host ends with the job's first process, and its ranks with it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from lmi_core.errors import EngineError, UserError
from lmi_core.settings.job import Job, job_of

log = logging.getLogger(__name__)

HOST_GONE = 256
"""In the place of a status: the host has ended, and its rank's process with it."""
_ROOT = Path(__file__).parents[3]
_BOOT = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from lmi_core.runners.cpu.rank_process import main_hosted; "
    "sys.exit(main_hosted(int(sys.argv[2])))"
)
_MEET_S = 60.0
"""In which all processes of a job must have started."""
_TALK_S = 10.0
_PAUSE_S = 0.05
_KEEP, _LOOK, _START = b"k", b"l", b"s"
"""What the first process asks for: that the host stays, what it may use, a rank."""
_CODE = struct.Struct(">i")
_CREDENTIALS = struct.Struct("3i")


def run_in_job(work: Callable[[], int]) -> int:
    """Do ``work``, which opens models, and return its status; of several processes of a job in the
    first one, while the others are hosts. Raises UserError for a job on several machines,
    EngineError where not all of its processes do this."""
    job = job_of(os.environ)
    if job is None:
        return work()
    if job.objection:
        raise UserError(job.objection, field="tensor_parallel_degree")
    if job.rank > 0:
        logging.basicConfig(format=f"process {job.rank} of {job.size}: %(message)s")
        with _Host(job) as host:
            return host.serve()
    with RankHosts(job) as hosts:
        return work() or int(hosts.is_lost)


class RankHosts:
    """The hosts of a job, as its first process has them: they stay until this ends."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._kept = ExitStack()
        self._wake, self._woken = socket.socketpair()
        self._watcher = threading.Thread(target=self._watch, name="rank-hosts", daemon=True)
        self._connections: dict[socket.socket, int] = {}
        self.is_lost = False
        """Whether a host ended, upon which this process is told to."""

    def __enter__(self) -> Self:
        """Raises EngineError where a host isn't found."""
        try:
            for rank in range(1, self._job.size):
                connection = self._kept.enter_context(_ask(self._job, rank, _KEEP, wait_s=_MEET_S))
                self._connections[connection] = rank
        except BaseException:
            self._close()
            raise
        self._watcher.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._wake.shutdown(socket.SHUT_RDWR)
        self._watcher.join()
        self._close()

    def _close(self) -> None:
        for each in (self._wake, self._woken, self._kept):
            each.close()

    def _watch(self) -> None:
        ready, _, _ = select.select([self._woken, *self._connections], [], [])
        if self._woken in ready:
            return
        self.is_lost = True
        [connection, *_] = ready
        log.error(
            "process %d of %d, which %s had started, is gone, and no rank runs there any more: "
            "the server stops",
            self._connections[connection],
            self._job.size,
            self._job.started_by,
        )
        os.kill(os.getpid(), signal.SIGTERM)


def host_cpus(job: Job | None) -> list[tuple[int, ...]]:
    """The logical cores that each of a job's processes may use, this one's first; nothing of
    none."""
    if job is None:
        return []
    found = [tuple(sorted(os.sched_getaffinity(0)))]
    for rank in range(1, job.size):
        with _ask(job, rank, _LOOK) as connection, connection.makefile("rb") as answer:
            found.append(tuple(json.loads(answer.readline())))
    return found


class HostedProcess:
    """A rank's process, which its host has started; as far as needed, what ``Popen`` is."""

    def __init__(self, job: Job, rank: int, descriptor: int) -> None:
        """``descriptor``: of the socket that the process gets. Raises EngineError without a
        host."""
        self._connection = _ask(job, rank, _START, descriptor)
        self._code = HOST_GONE
        self._has_ended = threading.Event()
        pid = _received(self._connection)
        if pid is None:
            self._connection.close()
            raise EngineError(f"process {rank} of {job.size}, of {job.started_by}, starts no rank")
        self.pid = pid
        threading.Thread(target=self._listen, name=f"host-of-{rank}", daemon=True).start()

    def wait(self, timeout: float | None = None) -> int:
        """Its status, as ``Popen`` gives it, or ``HOST_GONE``."""
        if not self._has_ended.wait(timeout):
            raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
        return self._code

    def kill(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _listen(self) -> None:
        with self._connection:
            code = _received(self._connection)
        self._code = HOST_GONE if code is None else code
        self._has_ended.set()


class _Host:
    """One of a job's processes but the first."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._kept: socket.socket | None = None
        self._server = socket.socket(socket.AF_UNIX)
        try:
            self._server.bind(_address(job, job.rank))
        except OSError:
            self._server.close()
            raise EngineError(
                f"another process is number {job.rank} of {job.size} that {job.started_by} has "
                "started: start each job by itself"
            ) from None
        self._server.listen()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.close()
        if self._kept is not None:
            self._kept.close()

    def serve(self) -> int:
        end_s = time.monotonic() + _MEET_S
        while True:
            watched = [self._server, *filter(None, [self._kept])]
            left_s = None if self._kept is not None else max(0.0, end_s - time.monotonic())
            ready, _, _ = select.select(watched, [], [], left_s)
            if self._kept in ready:
                return 0
            if self._server in ready:
                connection, _ = self._server.accept()
                if not self._answer(connection):
                    connection.close()
            elif not ready:
                raise EngineError(
                    f"the first of {self._job.size} processes that {self._job.started_by} has "
                    f"started didn't come within {_MEET_S:.0f} s"
                )

    def _answer(self, connection: socket.socket) -> bool:
        """Whether the connection stays."""
        connection.settimeout(_TALK_S)
        if not _is_ours(connection):
            return False
        try:
            asked, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
            if asked == _KEEP and self._kept is None:
                self._kept = connection
                # The first process has them too, and lets running requests end.
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, signal.SIG_IGN)
                return True
            if asked == _LOOK:
                connection.sendall(json.dumps(sorted(os.sched_getaffinity(0))).encode() + b"\n")
            if asked == _START and descriptors:
                connection.settimeout(None)
                self._start(connection, descriptors[0])
                return True
        except OSError as error:
            log.warning("a rank isn't started: %s", error)
        return False

    def _start(self, connection: socket.socket, descriptor: int) -> None:
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(_ROOT), str(descriptor)],
                pass_fds=(descriptor,),
                stdin=subprocess.PIPE,  # it ends with this process
                start_new_session=True,
            )
        finally:
            os.close(descriptor)
        try:
            connection.sendall(_CODE.pack(process.pid))
        except OSError:
            process.kill()
            raise
        threading.Thread(target=_wait_for, args=(process, connection), daemon=True).start()
        threading.Thread(target=_end_with, args=(process, connection), daemon=True).start()


def _wait_for(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    with process:
        code = process.wait()
    with suppress(OSError):
        connection.sendall(_CODE.pack(code))
        connection.shutdown(socket.SHUT_RDWR)


def _end_with(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    with connection, suppress(OSError):
        connection.recv(1)
    process.kill()


def _ask(job: Job, rank: int, what: bytes, *descriptors: int, wait_s: float = 0.0) -> socket.socket:
    """A connection to a host, for which so long is waited: one that was there and isn't is gone."""
    end_s = time.monotonic() + wait_s
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(_address(job, rank))
            if not _is_ours(connection):
                raise EngineError(f"rank {rank} of the job is another user's process")
            if descriptors:
                socket.send_fds(connection, [what], descriptors)
            else:
                connection.sendall(what)
            return connection
        except OSError:
            connection.close()
        except BaseException:
            connection.close()
            raise
        if time.monotonic() > end_s:
            raise EngineError(
                f"process {rank} of {job.size}, which {job.started_by} has started, isn't found on "
                f"this machine ({job.name}): all of them start the same lmi serve, in the same "
                f"container, and a script that starts it ends with exec{job.way_out}"
            )
        time.sleep(_PAUSE_S)


def _address(job: Job, rank: int) -> bytes:
    """Abstract: nothing is left of it when the host ends."""
    name = hashlib.blake2b(f"{job.started_by} {job.size} {job.name}".encode(), digest_size=12)
    return f"\0lmi-ranks/{os.geteuid()}/{name.hexdigest()}/{rank}".encode()


def _is_ours(connection: socket.socket) -> bool:
    """Whether the other end's user is this one: anybody may listen, and connect."""
    given = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(given)
    return bool(user == os.geteuid())


def _received(connection: socket.socket) -> int | None:
    with suppress(OSError):
        data = connection.recv(_CODE.size, socket.MSG_WAITALL)
        if len(data) == _CODE.size:
            [number] = _CODE.unpack(data)
            return int(number)
    return None
