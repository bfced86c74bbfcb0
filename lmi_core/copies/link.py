"""How a copy's process is started and reached: on this machine, or wherever somebody puts it."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

from lmi_core.copies.connection import Connection
from lmi_core.copies.sealed import NUM_SECRET_BYTES, SealedConnection
from lmi_core.errors import EngineError

T = TypeVar("T")
_DIAL_S = 20.0
_ROOT = Path(__file__).parents[2]
_BOOT = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from lmi_core.copies.child import main; sys.exit(main(int(sys.argv[2])))"
)


async def to_the_end(work: Callable[..., T], *arguments: Any) -> T:
    """What ``work`` returns, in a thread; who is cancelled waits for it, and can undo it."""
    working = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.gather(working, return_exceptions=True)
        raise


class Link(Protocol):
    """To one process, from its start to its end. All calls come from one event loop."""

    is_local: bool
    """Whether it is on this machine."""

    @property
    def name(self) -> str:
        """Where it is, for the log."""
        ...

    async def open(
        self, on_message: Callable[[Any], None], on_lost: Callable[[], None]
    ) -> Connection:
        """Start it and connect to it. Raises EngineError where that can't be."""
        ...

    def kill(self) -> None:
        """End it at once, if it runs; its connection is lost then."""
        ...

    async def ended(self) -> str:
        """Wait for its end; how it came."""
        ...


class LocalLink:
    """Implements ``Link``: a child over a Unix socket."""

    is_local = True

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        """``environment``: variables besides this process'."""
        self._environment = environment or {}
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def name(self) -> str:
        return f"process {self.pid}"

    async def open(
        self, on_message: Callable[[Any], None], on_lost: Callable[[], None]
    ) -> Connection:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *("-c", _BOOT, str(_ROOT), str(theirs.fileno())),
                    env={**os.environ, **self._environment},
                    pass_fds=(theirs.fileno(),),
                    stdin=asyncio.subprocess.DEVNULL,
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                raise
        connection = Connection(on_message, on_lost)
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: connection, sock=ours)
        return connection

    def kill(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            # The process object's own way asks for the exit status, which asyncio waits for.
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)

    async def ended(self) -> str:
        if self._process is None:
            return "never started"
        code = await self._process.wait()
        return f"exit status {code}" if code >= 0 else f"signal {-code}"


class SealedLink:
    """A part of ``Link``: to a process that listens for who has ``secret``."""

    is_local = False

    def __init__(self) -> None:
        self.secret = secrets.token_bytes(NUM_SECRET_BYTES)

    async def dial(
        self,
        host: str,
        port: int,
        on_message: Callable[[Any], None],
        on_lost: Callable[[], None],
    ) -> Connection:
        """Raises EngineError where nobody answers."""
        connection = SealedConnection(on_message, on_lost, secret=self.secret, dials=True)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_DIAL_S):
                await loop.create_connection(lambda: connection, host, port)
        except (OSError, TimeoutError) as error:
            why = str(error) or f"no answer for {_DIAL_S:.0f} s"
            raise EngineError(f"a copy at {host}:{port} can't be reached: {why}") from None
        return connection
