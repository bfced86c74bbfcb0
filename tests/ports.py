"""A port for a server that has to be told one."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """Of 127.0.0.1. While the block runs, the system gives it to nobody who names none: a socket
    holds it, which those who name it may share as long as it doesn't listen (``SO_REUSEADDR``)."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
