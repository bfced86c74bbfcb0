"""A signal while a model is loaded ends the server, and leaves no half of a file."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from tests.checkpoints import cached_checkpoint

QUERY = "model_name=second&synchronous="
SLOW_LOAD = """
import sys, time
from pathlib import Path
from lmi_core.models import loader
from lmi_core.weights import repack_cache

def write(partial, matrices, should_stop):
    partial.touch()
    print("half written", flush=True)
    time.sleep(300)

def load_weights(*given, **named):
    repack_cache.write_packed_file = write
    repack_cache.RepackCache(Path(sys.argv[2]), 1 << 30).write("name", {}, lambda: False)

loader.load_weights = load_weights
from lmi_core.cli import main
sys.exit(main(["serve", sys.argv[1], "--port", "0", *sys.argv[3:]]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("waits", ["true", "false"])
def test_it_ends_at_once(tmp_path: Path, number: signal.Signals, waits: str) -> None:
    model = cached_checkpoint("llama2", dtype="bfloat16")
    option = ["--option", f"wait_model_loading={waits}"]
    command = [sys.executable, "-c", SLOW_LOAD, str(model), str(tmp_path), *option]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        while "half written" not in (line := process.stdout.readline()):
            assert line, process.communicate()
        (partial,) = tmp_path.glob("*.partial")
        process.send_signal(number)
        _, log = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "stopping while a model is loaded" in log
    assert not partial.exists()


def test_it_ends_while_an_archive_is_fetched(tmp_path: Path) -> None:
    """Which comes before anything serves, and whose part doesn't stay."""
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "LMI_CACHE_DIR": str(tmp_path)}
    environ |= {"no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/m.tar.gz"
        option = ["--option", "model_url_pattern=.*", "--option", f"load_models={url}"]
        command = [sys.executable, "-m", "lmi_core", "serve", "--port", "0", *option]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ) as process:
            try:
                listener.settimeout(60)
                client, _ = listener.accept()
                with client:
                    client.recv(65536)
                    client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nhalf")
                    end_s = time.monotonic() + 60
                    while not (parts := [*tmp_path.rglob("*.fetched")]):
                        assert process.poll() is None, process.communicate()
                        assert time.monotonic() < end_s
                        time.sleep(0.01)
                    process.send_signal(signal.SIGTERM)
                    _, log = process.communicate(timeout=60)
            finally:
                process.kill()
    assert (process.returncode, "Traceback" in log) == (128 + signal.SIGTERM, False)
    assert not parts[0].exists()


@pytest.mark.parametrize("synchronous", ["true", "false"])
def test_a_model_that_is_loaded_by_a_call(tmp_path: Path, synchronous: str) -> None:
    """The server that serves another ends as soon as its requests have ended."""
    slow = SLOW_LOAD.replace("def load_weights(", "def slow_load(").replace(
        "loader.load_weights = load_weights",
        "real_load, calls = loader.load_weights, []\n"
        "def load_weights(*given, **named):\n"
        "    calls.append(given)\n"
        "    return (slow_load if calls[1:] else real_load)(*given, **named)\n"
        "loader.load_weights = load_weights",
    )
    model = cached_checkpoint("llama2", dtype="bfloat16")
    command = [sys.executable, "-c", slow, str(model), str(tmp_path)]
    command += ["--option", "model_url_pattern=.*"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        line = ""
        while (match := re.search(r"http://127\.0\.0\.1:(\d+)", line)) is None:
            line = process.stdout.readline()
            assert line, process.communicate()
        with ThreadPoolExecutor(1) as threads:
            call = threads.submit(post, int(match[1]), f"/models?{QUERY}{synchronous}&url={model}")
            while "half written" not in (line := process.stdout.readline()):
                assert line, process.communicate()
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=60)
            assert call.result() == (503 if synchronous == "true" else 202)
    assert process.returncode == 0
    assert "model second is not loaded any further: the server stops" in log
    assert not list(tmp_path.glob("*.partial"))


def test_a_models_own_code_ends_with_it(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "import os, time\nprint('loading', os.getpid())\ntime.sleep(300)\ndef handle(i): ...\n"
    )
    command = [sys.executable, "-m", "lmi_core", "serve", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "stdout: loading" not in (line := process.stderr.readline()):
            assert line
        pid = int(line.split()[-1])
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    stat = Path(f"/proc/{pid}/stat")
    assert not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def post(port: int, path: str) -> int:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("POST", path)
        with connection.getresponse() as answer:
            answer.read()
            return answer.status
