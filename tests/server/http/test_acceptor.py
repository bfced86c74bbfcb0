"""A server without descriptors: a line a second, and service again once there are some."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lmi_server.http.acceptor import Acceptor
from tests.server.harness import eventually


@contextmanager
def few_descriptors(num_free: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = os.open("/dev/null", os.O_RDONLY)
    os.close(spare)
    highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    holes = [os.open("/dev/null", os.O_RDONLY) for _ in range(highest - spare)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(highest, *holes, 0) + 1 + num_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for hole in holes:
            os.close(hole)


class Greeter(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(b"hello")


def test_accepting_stops_and_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmi_server.http.acceptor._PAUSE_S", 0.05)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as bound:
            acceptor = Acceptor(bound, Greeter, tls=None, handshake_timeout_s=1)
            acceptor.start(128)
            started_s = loop.time()
            clients = [socket.socket() for _ in range(20)]
            with few_descriptors(5):
                for client in clients:
                    client.setblocking(False)
                    client.connect_ex(bound.getsockname())
                await eventually(lambda: len(caplog.records) >= 3)
                # Those that were accepted are served meanwhile.
                assert await loop.sock_recv(clients[0], 5) == b"hello"
            assert await loop.sock_recv(clients[-1], 5) == b"hello"
            for client in clients:
                client.close()
            await acceptor.cleanup()
            assert len(caplog.records) <= 2 + (loop.time() - started_s) / 0.05

    with caplog.at_level("WARNING"):
        asyncio.run(run())
    assert all("no connection is accepted for" in r.getMessage() for r in caplog.records)
