"""A signal while a model is loaded ends the server, and leaves no half of a file."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import cached_checkpoint

SLOW_LOAD = """
import sys, time
from pathlib import Path
from lmi_core.models import loader
from lmi_core.weights import repack_cache

def write(partial, matrices, should_stop):
    partial.touch()
    print("half written", flush=True)
    time.sleep(300)

def load_model(*given, **named):
    repack_cache.write_packed_file = write
    repack_cache.RepackCache(Path(sys.argv[2]), 1 << 30).write("name", {}, lambda: False)

loader.load_model = load_model
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
