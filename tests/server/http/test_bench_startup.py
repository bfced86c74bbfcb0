"""The measurement of starts, on a tiny checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.checkpoints import cached_checkpoint


def test_figures_of_a_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 3_000_000)
    model = str(cached_checkpoint("llama2"))
    command = [sys.executable, "-m", "bench.startup", model, "--starts", "1"]
    result = subprocess.run(
        [*command, "--idle-seconds", "0.5", "--venv", str(tmp_path), "--json"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    assert 0 < figures["median_s"] == figures["worst_s"]
    assert 20 < figures["resident_mb"] <= figures["peak_resident_mb"] < 500
    assert 0 <= figures["idle_cpu_percent"] < 10
    assert 3 <= figures["venv_mb"] < 3.1


def test_a_server_that_does_not_start_is_said(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "bench.startup", str(tmp_path / "nowhere"), "--starts", "1"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 1
    assert "the server ended with exit code 2" in result.stderr
