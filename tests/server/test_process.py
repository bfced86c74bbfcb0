"""A server as a process: banner, signals, a busy port, logs."""

from __future__ import annotations

import json
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.server.configured import configured

STREAM = {"inputs": "a secret prompt", "parameters": {"max_new_tokens": 50}, "stream": True}


class Process:
    def __init__(self, **settings: Any) -> None:
        # Not a pipe: nobody reads the log while the server runs.
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "tests.server.fake_server", json.dumps(settings)],
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        self.banner: list[str] = []

    @property
    def port(self) -> int:
        match = re.search(r":(\d+)$", self.banner[0])
        assert match is not None
        return int(match[1])

    def wait_until_ready(self) -> None:
        assert self.popen.stdout is not None
        while not self.banner or not self.banner[-1].startswith("  ready "):
            line = self.popen.stdout.readline()
            assert line, "the server ended before it listened"
            self.banner.append(line.rstrip("\n"))

    def wait_until_draining(self) -> None:
        """Until it takes no connection any more."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=30).close()
            except ConnectionRefusedError:
                return
            time.sleep(0.01)
        raise AssertionError("it still takes connections")

    def finish(self, timeout_s: float = 20.0) -> tuple[int, str]:
        """Exit code and stderr."""
        self.popen.communicate(timeout=timeout_s)
        with self.log:
            self.log.seek(0)
            return self.popen.returncode, self.log.read()


@contextmanager
def running(**settings: Any) -> Iterator[Process]:
    settings.setdefault("server", {}).setdefault("port", 0)
    process = Process(**settings)
    try:
        process.wait_until_ready()
        yield process
    finally:
        process.popen.kill()
        process.popen.communicate()
        process.log.close()


def open_stream(port: int) -> socket.socket:
    """Send a streaming request and wait for the first bytes of its answer."""
    body = json.dumps(STREAM).encode()
    client = socket.create_connection(("127.0.0.1", port), timeout=60)
    head = f"POST /invocations HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body)
    assert client.recv(1, socket.MSG_PEEK)
    return client


def read_until_end(client: socket.socket) -> bytes:
    """Up to the last chunk; the connection stays open."""
    answer = b""
    while not answer.endswith(b"\r\n0\r\n\r\n"):
        answer += client.recv(65536)
    return answer


def read_all(client: socket.socket) -> bytes:
    pieces = []
    while piece := client.recv(65536):
        pieces.append(piece)
    return b"".join(pieces)


def test_banner_is_short() -> None:
    with running() as process:
        assert [line[:9] for line in process.banner[1:]] == [
            "  model  ",
            "  engine ",
            "  context",
            "  ready  ",
        ]
        assert re.fullmatch(r"  ready    in \d+\.\d\d s", process.banner[-1])


def test_routes_are_printed_if_asked() -> None:
    with running(server=configured("verbose=true")) as process:
        assert process.popen.stdout is not None
        lines = iter(process.popen.stdout.readline, "")
        text = next(lines)
        while "-d '" not in text:
            text += next(lines)
        for path in ("/invocations", "/predictions/{model}", "/ping", "/metrics"):
            assert path in text
        curl = text[text.index("curl") :].replace("\\\n", " ")
        if shutil.which("curl") is None:
            pytest.skip("curl is not installed")
        result = subprocess.run(shlex.split(curl), capture_output=True, timeout=60)
        assert result.returncode == 0
        assert len(result.stdout.splitlines()) == 64


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_drains_and_exits_0(number: int) -> None:
    with running(delay_s=0.02) as process:
        client = open_stream(process.port)
        process.popen.send_signal(number)
        process.wait_until_draining()
        answer = read_all(client)
        client.close()
        assert answer.count(b'{"token"') == 50
        assert answer.endswith(b"0\r\n\r\n")
        exit_code, stderr = process.finish()
        assert exit_code == 0
        assert "Traceback" not in stderr


def test_drain_timeout_cuts_off_and_exits_0() -> None:
    with running(delay_s=1.0, server={"drain_timeout_s": 0.2}) as process:
        client = open_stream(process.port)
        process.popen.terminate()
        exit_code, stderr = process.finish()
        client.close()
        assert exit_code == 0
        assert "1 requests did not finish" in stderr


def test_second_signal_hurries() -> None:
    with running(delay_s=1.0) as process:
        client = open_stream(process.port)
        process.popen.terminate()
        process.wait_until_draining()
        process.popen.terminate()
        assert process.finish()[0] == 0
        client.close()


def test_idle_keep_alive_connection_does_not_hold_up_the_end() -> None:
    with running() as process, socket.create_connection(("127.0.0.1", process.port)) as client:
        client.sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
        process.popen.terminate()
        assert process.finish()[0] == 0


def test_idle_server_uses_no_processor_time() -> None:
    def ticks(pid: int) -> int:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])

    with running() as process:
        client = open_stream(process.port)
        read_until_end(client)
        spent = [ticks(process.popen.pid)]
        for _ in range(10):  # on a busy machine, what the request has left takes its time
            time.sleep(1.0)
            spent.append(ticks(process.popen.pid))
            if spent[-1] - spent[-2] <= 1:
                break
        assert spent[-1] - spent[-2] <= 1
        client.close()


def test_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        exit_code, stderr = Process(server={"port": port}).finish()
        assert exit_code == 2
        assert stderr == (
            f"Port {port} on 127.0.0.1 is in use; stop what listens there or choose another "
            "--port\n"
        )


def test_unknown_host() -> None:
    exit_code, stderr = Process(server={"host": "192.0.2.1", "port": 0}).finish()
    assert exit_code == 2
    assert stderr.startswith("Can't listen on 192.0.2.1 port 0: ")
    assert stderr.count("\n") == 1


def test_json_logs_name_requests_but_never_show_prompts() -> None:
    with running(server={"log_format": "json"}) as process:
        client = open_stream(process.port)
        client.close()
        process.popen.terminate()
        _, stderr = process.finish()
    entries = [json.loads(line) for line in stderr.splitlines()]
    access = [entry for entry in entries if entry["logger"] == "lmi_server.http.access"]
    assert len(access) == 1
    assert access[0]["path"] == "/invocations"
    assert access[0]["id"]
    assert access[0]["status"] in (200, 499)
    assert "secret" not in stderr


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


NUM_IDLE = 5000


@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_NOFILE)[1] < NUM_IDLE + 100,
    reason="this system allows fewer open files",
)
def test_5000_idle_connections_cost_little_and_are_let_go() -> None:
    with running(server={"receive_timeout_s": 120.0}) as process:
        usual_s = seconds_of_answer(process.port)
        before = resident_bytes(process.popen.pid)
        clients = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.server.http.idle_clients",
                str(process.port),
                str(NUM_IDLE),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with clients:
            assert clients.stdout is not None
            assert clients.stdin is not None
            assert int(clients.stdout.readline()) == NUM_IDLE
            quickest_s = min(seconds_of_answer(process.port) for _ in range(4))
            assert quickest_s < 2 + 20 * usual_s  # the machine may be busy
            assert resident_bytes(process.popen.pid) - before < NUM_IDLE * 32 * 1024
            clients.stdin.close()
            clients.wait(60)
        deadline = time.monotonic() + 60
        while open_files(process.popen.pid) > 50:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert generated(process.port)


def open_files(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def seconds_of_answer(port: int) -> float:
    started = time.monotonic()
    assert generated(port)
    return time.monotonic() - started


def generated(port: int) -> str:
    body = json.dumps({**STREAM, "stream": False}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/invocations", body)
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["generated_text"])
